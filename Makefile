# `make` alone lists the targets. What CI runs (.ci/run) is these targets, step by step.

PYTHON := $(CURDIR)/target/venv/bin/python
FAULTS := cargo test --locked --test faults --
BUF := target/tools/node_modules/.bin/buf
CARGO_DENY_VERSION := 0.20.2

.DEFAULT_GOAL := help
.PHONY: help test valkey bench faults faults-short soak lint fmt docs services demo dashboard
.PHONY: pictures image image-short deny clean
.PHONY: check-clients check-deploy check-fmt check-clippy check-proto check-lua check-docs check-scripts

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

test: services ## run every test, beside a Redis, a PostgreSQL and a MariaDB of its own
	SECKILL_TEST_PYTHON=$(PYTHON) scripts/with-services cargo test --workspace --locked --no-fail-fast

valkey: services ## run what a Redis is needed for on a Valkey: valkey-server, or SECKILL_TEST_REDIS_SERVER
	SECKILL_TEST_PYTHON=$(PYTHON) SECKILL_TEST_REDIS_SERVER=$${SECKILL_TEST_REDIS_SERVER:-valkey-server} \
	  scripts/with-services cargo test --locked --test suite -- engine_redis:: cluster:: sentinel:: redis_tls:: \
	    broadcasts:: storm:: rebuilds:: outage:: traces:: servers::

bench: services ## measure every goal, on what images have, and write target/bench.json and target/bench.html (long)
	cargo build --profile dist --locked --package seckill --bin seckill
	scripts/with-services sh -ec ' \
	  SECKILL__DATABASE__URL="$$SECKILL_TEST_POSTGRES_URL" target/dist/seckill migrate up; \
	  target/dist/seckill bench goals --json target/bench.json --html target/bench.html \
	    --engine-url "$$SECKILL_TEST_REDIS_URL" --database-url "$$SECKILL_TEST_POSTGRES_URL"'

faults: services ## break every store, wire and server, on every database, and print what was lost (13 minutes)
	$(FAULTS) --full --json target/faults.json

faults-short: services ## the same, each fault once (4 minutes)
	$(FAULTS) --short --json target/faults-short.json

soak: services ## search for hours for what breaks a promise: SECKILL_SIM_SECONDS, SECKILL_MODEL_STEPS
	SECKILL_SIM_SECONDS=$${SECKILL_SIM_SECONDS:-600} SECKILL_SIM_THREADS=$${SECKILL_SIM_THREADS:-$$(nproc)} \
	  cargo test --release --locked --lib simulator::tests::no_seed_breaks_a_promise -- --nocapture
	SECKILL_MODEL_STEPS=$${SECKILL_MODEL_STEPS:-500000} \
	  scripts/with-services cargo test --locked --test suite -- model::

lint: check-fmt check-proto check-lua check-scripts check-deploy check-clippy check-docs ## run every check that is not a test

fmt: ## format the Rust code
	cargo fmt --all

docs: ## build the API documentation into target/doc
	cargo doc --no-deps --workspace --locked

services: ## install what the tests need and is missing; starts nothing
	@scripts/install-services

demo: ## run a whole sale in front of you
	cargo run --release --locked -- demo

dashboard: services ## build the dashboard anew, into dashboard/dist
	node dashboard/build.mjs

pictures: services ## take the pictures of the dashboard in docs/images anew, of a sale of a minute
	SECKILL_SALE_SECONDS=55 cargo test --locked --test suite -- dashboard::a_sale_runs
	mkdir -p docs/images
	cp target/pictures/dashboard-light.png target/pictures/dashboard-dark-phone.png docs/images

image: ## build the image of the Dockerfile and sell something in it, without an engine for containers (long)
	scripts/install-services image
	scripts/image-test

image-short: target/debug/seckill ## the same with the server that `make test` has built (10 seconds)
	scripts/install-services image
	scripts/image-test --binary target/debug/seckill

target/debug/seckill:
	cargo build --locked

check-deploy: services ## the manifests, the unit and the example are as Kubernetes, systemd and the schema want them
	scripts/check-deploy

check-clients: ## the clients in Go and Java compile, where Debian's packages for them are installed
	scripts/check-clients

deny: ## licences, sources and banned crates; compiles cargo-deny into target/tools (minutes)
	[ -x target/tools/cargo-deny/bin/cargo-deny ] || \
	  cargo install --locked --root target/tools/cargo-deny cargo-deny@$(CARGO_DENY_VERSION)
	target/tools/cargo-deny/bin/cargo-deny check bans licenses sources

clean: ## remove everything that was built or installed into target
	cargo clean

check-fmt: ## the Rust code is formatted
	cargo fmt --all --check

check-clippy: ## clippy has nothing to say
	cargo clippy --workspace --all-targets --locked -- -D warnings

check-proto: services ## buf finds nothing wrong with the API
	$(BUF) lint

check-lua: services ## luacheck finds nothing wrong with the scripts
	luacheck --quiet lua/

check-docs: ## the API documentation builds without a warning
	RUSTDOCFLAGS="-D warnings" cargo doc --no-deps --workspace --locked

check-scripts: services ## shellcheck finds nothing wrong with the shell scripts
	shellcheck --external-sources .ci/run scripts/locate.sh scripts/install-services scripts/with-services \
	  scripts/image-test scripts/check-clients scripts/check-deploy examples/python/generate examples/go/generate
