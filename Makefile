# A thin front: the work is in scripts/ and CMakePresets.json. `make` alone prints what there is.
.DEFAULT_GOAL := help
.NOTPARALLEL:
.PHONY: help setup run check build lint format sanitize fuzz coverage cross cuda-all install clean

PREFIX ?= /usr/local
SECONDS_TO_FUZZ ?= 60

help: ## print this
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## install what building needs (Debian), if anything is missing
	@scripts/setup

run: setup ## build, replay the recorded calls, serve the real context
	@scripts/build release
	@scripts/run

check: setup ## build with warnings as errors and run all tests
	@scripts/test dev

build: setup ## build the library and the command in build/release
	@scripts/build release

lint: ## clang-format, clang-tidy, shellcheck
	@scripts/setup --all
	@scripts/lint

format: ## apply clang-format
	@scripts/setup --all
	@scripts/format

sanitize: ## run the tests under address, undefined-behaviour and thread sanitizers
	@scripts/setup --all
	@scripts/test asan-ubsan
	@scripts/test tsan

fuzz: ## run each fuzzer for SECONDS_TO_FUZZ (60) altogether
	@scripts/setup --all
	@scripts/fuzz $(SECONDS_TO_FUZZ)

coverage: ## run the tests and print the share of lines they reach
	@scripts/setup --all
	@scripts/coverage

cross: ## build for 64-bit Arm, run tests and recorded calls under qemu-user
	@scripts/setup --cross
	@scripts/cross

cuda-all: setup ## compile libcsa_cuda.so for every supported GPU architecture
	@scripts/build cuda-all

install: build ## install under PREFIX (/usr/local); DESTDIR is honoured
	cmake --install build/release --prefix "$(PREFIX)"

clean: ## remove build/
	rm -rf build
