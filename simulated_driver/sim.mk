# SPDX-License-Identifier: Apache-2.0
# The simulated driver: libcuda.so.1 (cuda_*.c, engine.c, memory.c), libnvidia-ml.so.1 (nvml*.c) and aliquot-sim (simctl.c).
# Each part has its own list of sources; the two libraries and the program share SIM_COMMON. Included by cuda_shim/Makefile, whose tests run on it.

SIM := $(ROOT)/simulated_driver

# It includes its own headers and NVIDIA's ABI (cuda_shim/abi); nothing else of the shim.
$(OUT)/obj/simulated_driver/%.o: $(SIM)/%.c
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -I$(ROOT) -MMD -MP -c -o $@ $<

SIM_COMMON := state process cgroup topology topology_parse mig

# What module images hold; no part of it knows a device.
SIM_IMAGE := image image_text image_elf image_fatbin image_unpack image_write

SIM_CUDA := engine memory arena cuda_init cuda_error cuda_device cuda_context cuda_memory cuda_host cuda_copy cuda_array cuda_vmm cuda_pool \
            cuda_ipc cuda_module cuda_library cuda_function cuda_link cuda_tensor_map cuda_launch cuda_stream cuda_value cuda_user cuda_graph \
            cuda_graph_node cuda_graph_exec cuda_capture cuda_legacy cuda_texref cuda_entry $(SIM_IMAGE)

sim_objects = $(patsubst %,$(OUT)/obj/simulated_driver/%.o,$(1))

$(OUT)/lib/sim/libcuda.so.1: $(call sim_objects,$(SIM_COMMON) $(SIM_CUDA)) $(SIM)/libcuda.map
	@mkdir -p $(@D)
	$(CC) -shared -Wl,-soname,libcuda.so.1 -Wl,--version-script=$(SIM)/libcuda.map -Wl,-Bsymbolic -Wl,-z,nodelete \
	  -o $@ $(filter %.o,$^) $(ALL_LDFLAGS) -pthread -ldl

LIBS += $(OUT)/lib/sim/libcuda.so.1

# C tests of the CUDA side. They link the simulated library as an application would, and the node's state to look behind it.
SIM_CUDA_TESTS := test_cuda_memory test_cuda_work test_cuda_values test_cuda_ipc test_cuda_graphs test_cuda_threads
TESTS += $(patsubst %,$(OUT)/tests/%,$(SIM_CUDA_TESTS))

$(patsubst %,$(OUT)/tests/%,$(SIM_CUDA_TESTS)): $(OUT)/tests/%: $(OUT)/obj/simulated_driver/tests/%.o $(call sim_objects,tests/harness $(SIM_COMMON)) \
  | $(OUT)/lib/sim/libcuda.so.1
	@mkdir -p $(@D)
	$(CC) -o $@ $^ -L$(OUT)/lib/sim -l:libcuda.so.1 -Wl,-rpath,'$$ORIGIN/../lib/sim' $(ALL_LDFLAGS) -pthread

# Images: the readers themselves, and a program that loads what they read.
TESTS += $(OUT)/tests/test_images

$(OUT)/tests/test_images: $(call sim_objects,tests/test_images tests/harness $(SIM_COMMON) $(SIM_IMAGE)) | $(OUT)/lib/sim/libcuda.so.1
	@mkdir -p $(@D)
	$(CC) -o $@ $^ -L$(OUT)/lib/sim -l:libcuda.so.1 -Wl,-rpath,'$$ORIGIN/../lib/sim' $(ALL_LDFLAGS) -pthread -ldl

# ---- NVML and the control program ----

SIM_NVML := nvml nvml_device nvml_memory nvml_process nvml_mig nvml_topology nvml_health nvml_sensors nvml_gpm nvml_unsupported nvml_export

$(OUT)/lib/sim/libnvidia-ml.so.1: $(call sim_objects,$(SIM_COMMON) $(SIM_NVML)) $(SIM)/libnvidia-ml.map
	@mkdir -p $(@D)
	$(CC) -shared -Wl,-soname,libnvidia-ml.so.1 -Wl,--version-script=$(SIM)/libnvidia-ml.map -Wl,-Bsymbolic -Wl,-z,nodelete \
	  -o $@ $(filter %.o,$^) $(ALL_LDFLAGS) -pthread

LIBS += $(OUT)/lib/sim/libnvidia-ml.so.1

# The topologies are part of the program: every line of a file becomes a string.
SIM_PROFILES := $(sort $(wildcard $(SIM)/profiles/*))

$(OUT)/gen/profiles.c: $(SIM_PROFILES) $(SIM)/sim.mk
	@mkdir -p $(@D)
	{ echo '#include "simulated_driver/profiles.h"'; echo 'const struct sim_profile sim_profiles[] = {'; \
	  for file in $(SIM_PROFILES); do \
	    echo "{ \"$$(basename $$file)\","; sed 's/\\/\\\\/g; s/"/\\"/g; s/.*/"&\\n"/' $$file; echo '},'; \
	  done; echo '{ 0, 0 } };'; } > $@.new && mv $@.new $@

$(OUT)/obj/gen/profiles.o: $(OUT)/gen/profiles.c
	@mkdir -p $(@D)
	$(CC) $(ALL_CFLAGS) -I$(ROOT) -c -o $@ $<

$(OUT)/bin/aliquot-sim: $(call sim_objects,$(SIM_COMMON) simctl) $(OUT)/obj/gen/profiles.o
	@mkdir -p $(@D)
	$(CC) -o $@ $^ $(ALL_LDFLAGS) -pthread

PROGRAMS += $(OUT)/bin/aliquot-sim
