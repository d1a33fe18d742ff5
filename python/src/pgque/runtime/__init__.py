"""Run handlers: AsyncWorker, AsyncWorkQueue, AsyncConsumer. Public are the names in `pgque`.

`workers` and `consumer` are the two kinds, `runtime` the loop of both. `exchange` receives and reports
`batches`, from `sources`; `handlers`, `tasks`, `middleware`, `retries` and `transactional` are about one
call, `leases`, `listen`, `liveness`, `processes`, `concurrency` and `stopper` about the whole process.
"""
