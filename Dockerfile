# PostgreSQL 17 with pg_cron and pgque, installed and ticking:
#   docker build -t pgque . && docker run -d --name pgque -e POSTGRES_PASSWORD=secret -p 5432:5432 pgque
# The program pgque with its web page, which needs a database elsewhere:
#   docker build -t pgque-web --target web .
# The files of the extension alone, for a server that mounts them: an image volume of CloudNativePG, or a folder in
# extension_control_path of PostgreSQL 18:
#   docker build -t pgque-extension --target extension .
# tests/image/compose.yaml runs both, with Prometheus and Grafana.
ARG BASE_IMAGE=debian:trixie-slim

FROM ${BASE_IMAGE} AS files

COPY sql/files.sh sql/Makefile sql/pgque.control sql/pgque.sql /pgque/
RUN sh /pgque/files.sh /files/share/extension

FROM scratch AS extension

COPY --from=files /files /

FROM ${BASE_IMAGE} AS database

ENV LANG=C.UTF-8 \
    PATH=/usr/lib/postgresql/17/bin:$PATH \
    PGDATA=/var/lib/postgresql/data

RUN export DEBIAN_FRONTEND=noninteractive \
 && apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends postgresql-common \
 && sed -i 's/^#* *create_main_cluster.*/create_main_cluster = false/' /etc/postgresql-common/createcluster.conf \
 && apt-get install -y -qq --no-install-recommends postgresql-17 postgresql-17-cron \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*.log \
 && install -d -o postgres -g postgres -m 3777 /var/run/postgresql \
 && install -d -o postgres -g postgres -m 700 "$PGDATA" \
 && install -d /docker-entrypoint-initdb.d

COPY --from=files /files/share/extension /usr/share/postgresql/17/extension
COPY sql/pgque.sql /usr/share/pgque/
COPY tests/image/entrypoint.sh /usr/local/bin/docker-entrypoint.sh
RUN chmod a+r /usr/share/pgque/pgque.sql && chmod 755 /usr/local/bin/docker-entrypoint.sh

VOLUME /var/lib/postgresql/data
EXPOSE 5432
STOPSIGNAL SIGINT
HEALTHCHECK --interval=5s --timeout=5s --start-period=60s --retries=3 CMD ["pg_isready", "-q", "-h", "127.0.0.1"]
ENTRYPOINT ["docker-entrypoint.sh"]
CMD ["postgres"]

FROM ${BASE_IMAGE} AS web

ENV LANG=C.UTF-8 \
    PYTHONPATH=/opt/pgque/python/src \
    PYTHONUNBUFFERED=1

# Debian's packages of what the extras web and metrics need.
RUN export DEBIAN_FRONTEND=noninteractive \
 && apt-get update -qq \
 && apt-get install -y -qq --no-install-recommends python3-psycopg python3-psycopg-pool python3-click python3-rich \
      python3-starlette python3-jinja2 python3-uvicorn python3-prometheus-client \
 && rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/*.log \
 && useradd --system --user-group --no-create-home --home-dir /nonexistent --shell /usr/sbin/nologin pgque

# The package has links to the SQL files, which lead from the one folder to the other.
COPY python/src/pgque /opt/pgque/python/src/pgque
COPY sql/pgque.sql /opt/pgque/sql/pgque.sql
COPY tests/sql/previous/pgque-0.8.0.sql.xz /opt/pgque/tests/sql/previous/
RUN chmod -R a+rX /opt/pgque \
 && printf '#!/bin/sh\nexec python3 -m pgque.cli "$@"\n' > /usr/local/bin/pgque && chmod 755 /usr/local/bin/pgque \
 && python3 -m compileall -q /opt/pgque/python/src && pgque --version

USER pgque
EXPOSE 8811
HEALTHCHECK --interval=5s --timeout=5s --start-period=30s --retries=3 \
  CMD ["python3", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8811/healthz', timeout=4)"]
ENTRYPOINT ["pgque"]
# Passwords travel in the clear: publish the port on 127.0.0.1 only, or have a proxy with TLS before it.
CMD ["web", "--host", "0.0.0.0", "--insecure"]

# What is built where no target is named
FROM database
