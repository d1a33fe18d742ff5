procrastinate --app=retries.app schema --apply
