# Fuzz targets. Each is one more test of `make check`, bounded, driven by fuzz/driver.c: any C compiler will do.
#
#   make -C cuda_shim fuzz CC=clang   the same targets under libFuzzer, into build/fuzz, to be run by hand for as long as one likes
#   FUZZ_RUNS=100000 FUZZ_SEED=7 build/tests/fuzz_region build    a longer run of the plain driver

FUZZ_TESTS := fuzz_limits fuzz_region fuzz_calls
TESTS += $(patsubst %,$(OUT)/tests/%,$(FUZZ_TESTS))

# What a target tests is linked in, so that sanitizers and libFuzzer see it; fuzz_calls opens the built front, as a program does.
FUZZ_PARTS := tests/support log region/limits region/region

$(patsubst %,$(OUT)/tests/%,$(FUZZ_TESTS)): $(OUT)/tests/%: $(OUT)/obj/fuzz/%.o $(call shim_objects,fuzz/driver $(FUZZ_PARTS))
	@mkdir -p $(@D)
	$(CC) -o $@ $^ $(ALL_LDFLAGS) -pthread -ldl

FUZZER := -fsanitize=fuzzer,address,undefined

.PHONY: fuzz
fuzz: all
	@$(CC) --version | grep -q clang || { echo "libFuzzer is clang's: make fuzz CC=clang" >&2; exit 1; }
	@mkdir -p $(OUT)/fuzz
	@set -e; for target in $(FUZZ_TESTS); do \
	  echo "$(OUT)/fuzz/$$target"; \
	  $(CC) $(ALL_CFLAGS) $(FUZZER) -o $(OUT)/fuzz/$$target $(HERE)/fuzz/$$target.c $(patsubst %,$(HERE)/%.c,$(FUZZ_PARTS)) -pthread -ldl; \
	done
