# The queues, after `pgque install`
pgque create orders --subscribe confirming
pgque create payments --subscribe charging
pgque create reports --subscribe reporting
pgque create clicks --subscribe storing
