-- The role of the exporter and of Grafana. It needs pgque_reader, which may receive messages too: keep its password.
\set password `printf %s "$PGQUE_MONITOR_PASSWORD"`
create role pgque_monitor login password :'password' in role pgque_reader, pg_read_all_stats;
