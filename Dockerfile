# One server with its data in /data: the embedded engine and SQLite, unless settings say otherwise.
#
#   docker build -t seckill .
#   docker run -p 127.0.0.1:50051:50051 -v seckill:/data --stop-timeout 20 seckill
#
# Inside a container only the outside world can call, so the server listens on all addresses, with
# --insecure: unless tokens are set, callers are not asked who they are. Publish the port to nobody
# but your own services.
#
# Settings: mount a file over /seckill.toml, or set variables such as SECKILL__ENGINE__URL and
# SECKILL__DATABASE__URL.

FROM rust:1-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN cargo build --locked --profile dist --package seckill --bin seckill
RUN printf '[grpc]\naddr = "0.0.0.0:50051"\n[http]\naddr = "0.0.0.0:9090"\n' >/seckill.toml

FROM debian:bookworm-slim
RUN useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin seckill \
    && install --directory --owner seckill --group seckill /data
COPY --from=build /src/target/dist/seckill /usr/local/bin/seckill
COPY --from=build /seckill.toml /seckill.toml
# The default settings name ./seckill.toml and ./data.
WORKDIR /
USER seckill
VOLUME /data
EXPOSE 50051 9090
# A stop waits up to 15 s for calls under way (grpc.shutdown_grace_ms): allow it more than that.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=6s --start-period=20s --retries=3 CMD ["seckill", "health"]
ENTRYPOINT ["seckill"]
CMD ["serve", "--insecure"]
