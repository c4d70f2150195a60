# SPDX-License-Identifier: Apache-2.0
# A stand-in for cuBLAS and cuBLASLt of CUDA 13, for PyTorch on the simulated driver. Included by cuda_shim/Makefile.

BLAS := $(ROOT)/simulated_runtime/blas

blas_objects = $(patsubst %,$(OUT)/obj/simulated_runtime/blas/%.o,$(1))

$(OUT)/obj/simulated_runtime/blas/%.o: $(BLAS)/%.c
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -I$(ROOT) -MMD -MP -c -o $@ $<

$(OUT)/lib/runtime/libcublas.so.13: $(call blas_objects,gpu handle routines) $(BLAS)/libcublas.map
$(OUT)/lib/runtime/libcublasLt.so.13: $(call blas_objects,gpu lt) $(BLAS)/libcublasLt.map

# Names and version nodes are those of NVIDIA's libraries: a program that is linked with them takes these by LD_PRELOAD.
$(OUT)/lib/runtime/libcublas.so.13 $(OUT)/lib/runtime/libcublasLt.so.13: $(OUT)/lib/runtime/%:
	@mkdir -p $(@D)
	$(CC) -shared -Wl,-soname,$* -Wl,--version-script=$(filter %.map,$^) -Wl,-Bsymbolic \
	  -o $@ $(filter %.o,$^) $(ALL_LDFLAGS) -ldl -pthread

BLAS_LIBS := $(OUT)/lib/runtime/libcublas.so.13 $(OUT)/lib/runtime/libcublasLt.so.13
LIBS += $(BLAS_LIBS)

TESTS += $(OUT)/tests/test_blas

$(OUT)/tests/test_blas: $(call blas_objects,tests/test_blas) $(call sim_objects,tests/harness $(SIM_COMMON)) \
  | $(BLAS_LIBS) $(OUT)/lib/sim/libcuda.so.1
	@mkdir -p $(@D)
	$(CC) -o $@ $^ -L$(OUT)/lib/runtime -l:libcublas.so.13 -l:libcublasLt.so.13 -L$(OUT)/lib/sim -l:libcuda.so.1 \
	  -Wl,-rpath,'$$ORIGIN/../lib/runtime:$$ORIGIN/../lib/sim' $(ALL_LDFLAGS) -pthread
