procrastinate --app=send.app schema --apply
