# One server with its data in /data: the embedded engine and SQLite, unless settings say otherwise.
#
#   docker build -t seckill .
#   docker run -p 127.0.0.1:50051:50051 -v seckill:/data --stop-timeout 20 seckill
#
# Inside a container only the outside world can call, so the server listens on all addresses, with
# --insecure: unless tokens are set, callers are not asked who they are. Publish the port to nobody
# but your own services, or set tokens and run `serve` without --insecure.
#
# Settings: mount a file over /seckill.toml, or set variables such as SECKILL__ENGINE__URL and
# SECKILL__DATABASE__URL. With TLS the health check needs SECKILL_SERVER=https://NAME:50051 and
# SECKILL_CA_FILE.
#
# `make image` builds this file and tries the image, without an engine for containers.

ARG RUST_IMAGE=docker.io/library/rust:1-slim-bookworm
# The C library, the CAs of the world and no shell.
ARG BASE_IMAGE=gcr.io/distroless/cc-debian12

FROM ${RUST_IMAGE} AS build
WORKDIR /src
COPY . .
RUN cargo build --locked --profile dist --package seckill --bin seckill \
    && install -D target/dist/seckill /image/usr/local/bin/seckill \
    && install -D -m 644 deploy/image.toml /image/seckill.toml \
    && install -d /image/data

FROM ${BASE_IMAGE}
COPY --from=build /image/usr /usr
COPY --from=build /image/seckill.toml /seckill.toml
COPY --from=build --chown=10001:10001 /image/data /data
# The default settings name ./seckill.toml and ./data.
WORKDIR /
USER 10001:10001
VOLUME /data
EXPOSE 50051 9090
# A stop waits up to 15 s for calls under way (grpc.shutdown_grace_ms): allow it more than that.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=5s --timeout=6s --start-period=20s --retries=3 CMD ["/usr/local/bin/seckill", "health"]
ENTRYPOINT ["/usr/local/bin/seckill"]
CMD ["serve", "--insecure"]
