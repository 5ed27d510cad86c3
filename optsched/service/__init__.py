"""Answer questions about clusters and schedules over HTTP; needs the extra ``service``.

`optsched.service.app.create_app` returns the ASGI application, `optsched.service.app.serve` runs
it; `optsched.service.queries` answers the same queries without HTTP.
"""
