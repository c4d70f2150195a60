# SPDX-License-Identifier: Apache-2.0
# Fuzz targets. Each is also a bounded test of `make check`, driven by fuzz/driver.c: any C compiler will do.
#
#   make -C cuda_shim fuzz CC=clang [FUZZ_SECONDS=180]   the same targets under libFuzzer, each for this long; the corpus is kept in build/fuzz
#   FUZZ_RUNS=100000 FUZZ_SEED=7 build/tests/fuzz_region build    a longer run of the plain driver

FUZZ_TESTS := fuzz_limits fuzz_region fuzz_calls fuzz_images
TESTS += $(patsubst %,$(OUT)/tests/%,$(FUZZ_TESTS))

# The tested parts are linked in, so that sanitizers and libFuzzer see them; fuzz_calls opens the built front, as a program does.
FUZZ_PARTS := tests/unpacked tests/support log limit/bucket limit/control limit/settle region/limits region/region
$(OUT)/obj/fuzz/fuzz_images.o: OBJ_CFLAGS := -I$(ROOT)

$(patsubst %,$(OUT)/tests/%,$(FUZZ_TESTS)): $(OUT)/tests/%: $(OUT)/obj/fuzz/%.o $(call shim_objects,fuzz/driver $(FUZZ_PARTS)) $(call sim_objects,$(SIM_IMAGE))
	@mkdir -p $(@D)
	$(CC) -o $@ $^ $(ALL_LDFLAGS) -pthread -ldl

FUZZER := -fsanitize=fuzzer,address,undefined
FUZZED := -fsanitize=fuzzer-no-link,address,undefined
FUZZ_SECONDS ?= 180

# Checked before anything is built.
.PHONY: fuzz fuzzer
fuzzer:
	@$(CC) --version 2> /dev/null | grep -q clang || { echo "libFuzzer needs clang, and $(CC) is missing or is not clang: make fuzz CC=clang" >&2; exit 1; }
	@echo 'int LLVMFuzzerTestOneInput(const char *data, unsigned long bytes) { return 0; }' | \
	  $(CC) $(FUZZER) -x c -o /dev/null - 2>/dev/null || \
	  { echo "this clang has no libFuzzer: install its runtime libraries (compiler-rt; Debian: libclang-rt-<version>-dev)" >&2; exit 1; }

# A build directory with a front that reports its coverage to libFuzzer. The symbols of its sanitizers are the program's, which is loaded first.
FUZZ_BUILD := $(OUT)/fuzz/build
FRONT_SOURCES := $(patsubst %,$(HERE)/%.c,$(filter-out %-asm,$(SHIM_COMMON) $(SHIM_CUDA))) $(HERE)/interpose/gate.S

fuzz: fuzzer
	@$(MAKE) --no-print-directory all
	@mkdir -p $(FUZZ_BUILD)/lib/shim
	@ln -sfn $(OUT)/bin $(FUZZ_BUILD)/bin && ln -sfn $(OUT)/lib/sim $(FUZZ_BUILD)/lib/sim
	@ln -sfn $(OUT)/lib/shim/libnvidia-ml.so.1 $(OUT)/lib/shim/libaliquot-preload.so $(FUZZ_BUILD)/lib/shim/
	@$(CC) $(ALL_CFLAGS) -I$(HERE) -ftls-model=initial-exec $(FUZZED) -o $(FUZZ_BUILD)/lib/shim/libcuda.so.1 $(filter-out %-undefined,$(SHIM_LDFLAGS)) \
	  $(call front_flags,libcuda.so.1) -Wl,--version-script=$(OUT)/obj/maps/cuda.map $(FRONT_SOURCES) \
	  $(OUT)/obj/driver/libcuda.aliquot-driver.so.1 -ldl -pthread
	@set -e; for target in $(FUZZ_TESTS); do \
	  $(CC) $(ALL_CFLAGS) -I$(HERE) -I$(ROOT) $(FUZZER) -rdynamic -o $(OUT)/fuzz/$$target $(HERE)/fuzz/$$target.c $(patsubst %,$(HERE)/%.c,$(FUZZ_PARTS)) \
	    $(patsubst %,$(SIM)/%.c,$(SIM_IMAGE)) -pthread -ldl; \
	  mkdir -p $(OUT)/fuzz/corpus/$$target; \
	  echo "$$target for $(FUZZ_SECONDS) s, inputs in $(OUT)/fuzz/corpus/$$target"; \
	  ALIQUOT_BUILD=$(FUZZ_BUILD) $(OUT)/fuzz/$$target -max_total_time=$(FUZZ_SECONDS) -print_final_stats=1 -verbosity=0 \
	    -artifact_prefix=$(OUT)/fuzz/$$target- $(OUT)/fuzz/corpus/$$target; \
	done
