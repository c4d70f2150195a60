# SPDX-License-Identifier: Apache-2.0
# The C side for arm64 by a cross compiler, and its tests under qemu-user, where both are installed.
#
#   make -C cuda_shim arm64    into build/arm64 (Debian: gcc-aarch64-linux-gnu libc6-dev-arm64-cross, and qemu-user or qemu-user-static)
#
# Without the tests that load the simulated driver: it reserves terabytes of address space, for which qemu-user keeps tables in real memory.

ARM64_CC    ?= aarch64-linux-gnu-gcc
ARM64_QEMU  := $(or $(shell command -v qemu-aarch64 || command -v qemu-aarch64-static),qemu-aarch64)
ARM64_RUN   ?= $(ARM64_QEMU) -L /usr/aarch64-linux-gnu
ARM64_TESTS := $(SHIM_TESTS) test_gate fuzz_limits fuzz_region
ARM64_BUILD := $(BUILD)/arm64

.PHONY: arm64
arm64:
	@for tool in $(ARM64_CC) $(firstword $(ARM64_RUN)); do \
	  command -v $$tool > /dev/null || { echo "make arm64 needs $$tool: see arm64.mk for the packages" >&2; exit 1; }; done
	@$(MAKE) --no-print-directory CC=$(ARM64_CC) BUILD=$(ARM64_BUILD) SAN= all
	@set -e; for test in $(ARM64_TESTS); do \
	  $(ARM64_RUN) $(ARM64_BUILD)/tests/$$test $(ARM64_BUILD); echo "ok      $$test [arm64]"; done
