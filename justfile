# Recipes for people and for CI. `just` with no arguments lists them.

default:
    @just --list

# Formatting and lints; warnings are errors.
check:
    cargo fmt --all --check
    cargo clippy --workspace --all-targets --locked -- -D warnings
    cargo clippy -p lacuna-pages --all-targets --no-default-features --locked -- -D warnings

# Every test of the workspace.
test:
    cargo test --workspace --locked

# The Vulkan device's tests; `.ci/install-vulkan` installs a software driver to run them on.
test-vulkan:
    .ci/test-vulkan

# The property tests on random cases; with a seed, on those that it was printed with.
test-random *seed:
    .ci/test-random {{seed}}

# Small mistakes in pages, kv and scheduler, each of which a test should notice. Stopped and started again, it goes on where it was.
mutants *options:
    .ci/test-mutants {{options}}

# The kernels' tests with AVX-512, on an emulated processor: all, or those whose names contain a filter.
test-avx512 *filters:
    .ci/test-avx512 {{filters}}

# The kernels' tests as a 64-bit ARM, emulated; `--program` runs the demo model too.
test-neon *options:
    .ci/test-neon {{options}}

# Types and lints of everything for macOS, which nobody has run yet; fetches a compiler where rustup has none.
check-apple:
    .ci/check-apple

# The scheduler, the prefix cache and the pool through everything that can happen, with new seeds for so
# many seconds. A failure names its seed: LACUNA_SIMULATION_SEED=... runs that one again.
simulate seconds="60":
    LACUNA_SIMULATION_SECONDS={{seconds}} cargo test --locked --lib simulation::whatever -- --nocapture

# The server with the official OpenAI client and a browser; installs both.
test-server:
    .ci/test-server

# Fails each system call of `run` and `serve` once, and walks limits on memory and files; needs strace.
test-system-faults *program:
    .ci/test-system-faults {{program}}

# `run` and `serve` under memory limits of the system; needs root. `--quick` for four limits instead of ten.
test-memory-limits *options:
    .ci/test-memory-limits {{options}}

# The Python package: builds its wheel, installs it apart, and tests it, its types and its plugin for llm.
test-python:
    .ci/test-python

# The bindings for Swift, Kotlin and others: writes them, and tests them through Python and Kotlin.
test-bindings:
    .ci/test-bindings

# Packs every crate as crates.io would have it, and compiles each from its package.
test-packages *options:
    .ci/test-packages {{options}}

# The worker for Dynamo behind Dynamo's frontend; installs it, and takes the wheel that test-python has built.
test-dynamo:
    .ci/test-dynamo

# Replicas of the Python package on Ray Serve; installs Ray, and takes the wheel that test-python has built.
test-ray:
    .ci/test-ray

# Object stores behind the KV cache folder, against a server of S3, which it installs; compiles the feature `remote`.
test-remote:
    .ci/test-remote

# Servers of the demo model behind vllm-router and smg, which it installs. `--figures` for the table in docs/fleet.md alone.
test-fleet *options:
    .ci/test-fleet {{options}}

# Generate text with the demo model.
demo prompt="What is ownership?":
    cargo run --release --locked -- run demo -p "{{prompt}}" -n 64

# Speed of the kernels and cost of the pages on this machine.
bench:
    cargo run --release --locked -- bench kernels
    cargo run --release --locked -- bench pages

# Run every fuzz target for a while (needs a nightly toolchain).
fuzz seconds="60":
    .ci/test-fuzz {{seconds}}
