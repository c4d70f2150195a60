# SPDX-License-Identifier: Apache-2.0
# The shim: two fronts that stand in for the driver's libraries, and one preload with both.
# They come from the same objects and the same hook tables; the version scripts are the tables, expanded.

SHIM_COMMON := log early region/limits region/region region/node_page region/container account/account account/map interpose/object \
               interpose/naming limit/bucket limit/control limit/settle
SHIM_CUDA   := shim interpose/parts interpose/life_cycle interpose/resolve interpose/driver interpose/device interpose/view \
               interpose/context interpose/measure interpose/outputs interpose/code interpose/lazy interpose/module interpose/allocations \
               interpose/spread interpose/managed interpose/memory interpose/latch \
               interpose/capture interpose/deferred interpose/reservoir \
               interpose/pool interpose/synchronize interpose/vmm interpose/array interpose/launch \
               interpose/unpaced interpose/ceiling interpose/pacer interpose/sample interpose/correction interpose/wait interpose/time_slot \
               interpose/admission interpose/payer interpose/pace \
               interpose/neighbours interpose/prefetch interpose/submit interpose/gate-asm \
               limit/cost limit/in_flight limit/priority limit/turns \
               interpose/driver_nvml interpose/own_use interpose/image
SHIM_NVML   := interpose/nvml interpose/nvml_export interpose/nvml_table

shim_objects = $(patsubst %,$(OUT)/obj/%.o,$(1))

# nodelete: threads may be inside when a program closes it. Bsymbolic: calls inside the shim stay inside, even if another library exports the names.
SHIM_LDFLAGS := -shared -Wl,-z,nodelete -Wl,-Bsymbolic -Wl,--no-undefined

$(OUT)/obj/maps/%.map: $(HERE)/maps/%.map.in $(HERE)/interpose/hooks.def $(HERE)/interpose/nvml_hooks.def
	@mkdir -p $(@D)
	$(CC) -E -P -x c -I$(HERE) -o $@ $<

# Empty libraries under the private names that the driver's have in a container: they only make the DT_NEEDED entries.
$(OUT)/obj/driver/%: $(HERE)/maps/driver.c
	@mkdir -p $(@D)
	$(CC) -shared -nostdlib -o $@ -Wl,-soname,$* $<

# The real driver, in a container and in a container's unpacked root file system. Old dtags: DT_RPATH also holds for what the driver loads.
DRIVER_RPATH := /run/aliquot/driver:\$$ORIGIN/../../../run/aliquot/driver:\$$ORIGIN/../../run/aliquot/driver
front_flags = -Wl,-soname,$(1) -Wl,--disable-new-dtags -Wl,-rpath,"$(DRIVER_RPATH)" -Wl,--no-as-needed

$(OUT)/lib/shim/libcuda.so.1: $(call shim_objects,$(SHIM_COMMON) $(SHIM_CUDA)) $(OUT)/obj/maps/cuda.map $(OUT)/obj/driver/libcuda.aliquot-driver.so.1
	@mkdir -p $(@D)
	$(CC) -o $@ $(SHIM_LDFLAGS) $(call front_flags,libcuda.so.1) -Wl,--version-script=$(OUT)/obj/maps/cuda.map \
	  $(filter %.o,$^) $(OUT)/obj/driver/libcuda.aliquot-driver.so.1 $(ALL_LDFLAGS)

$(OUT)/lib/shim/libnvidia-ml.so.1: $(call shim_objects,$(SHIM_COMMON) $(SHIM_NVML)) $(OUT)/obj/maps/nvml.map $(OUT)/obj/driver/libnvidia-ml.aliquot-driver.so.1
	@mkdir -p $(@D)
	$(CC) -o $@ $(SHIM_LDFLAGS) $(call front_flags,libnvidia-ml.so.1) -Wl,--version-script=$(OUT)/obj/maps/nvml.map \
	  $(filter %.o,$^) $(OUT)/obj/driver/libnvidia-ml.aliquot-driver.so.1 $(ALL_LDFLAGS)

$(OUT)/obj/interpose/%-asm.o: $(HERE)/interpose/%.S
	@mkdir -p $(@D)
	$(CC) -c -fPIC -o $@ $<

$(OUT)/lib/shim/libaliquot-preload.so: $(call shim_objects,$(SHIM_COMMON) $(SHIM_CUDA) $(SHIM_NVML) interpose/dlsym interpose/dlsym-asm) $(OUT)/obj/maps/preload.map
	@mkdir -p $(@D)
	$(CC) -o $@ $(SHIM_LDFLAGS) -Wl,-soname,libaliquot-preload.so -Wl,--version-script=$(OUT)/obj/maps/preload.map $(filter %.o,$^) $(ALL_LDFLAGS)

LIBS += $(OUT)/lib/shim/libcuda.so.1 $(OUT)/lib/shim/libnvidia-ml.so.1 $(OUT)/lib/shim/libaliquot-preload.so

# Only a few bytes of thread-local state, reached without a call: a library that is loaded at the start may use the static block.
$(call shim_objects,$(SHIM_CUDA) early): OBJ_CFLAGS := -ftls-model=initial-exec -fno-plt

# C tests: each is a program with the parts it tests linked in, so that sanitizers see all of them.
SHIM_TESTS := test_map test_limits_page test_region test_limit test_turns test_node_page test_naming test_image test_log
TESTS += $(patsubst %,$(OUT)/tests/%,$(SHIM_TESTS))

$(patsubst %,$(OUT)/tests/%,$(SHIM_TESTS)): $(OUT)/tests/%: $(OUT)/obj/tests/%.o $(call shim_objects,tests/support log region/limits region/region region/node_page account/map \
  limit/bucket limit/control limit/cost limit/in_flight limit/priority limit/settle limit/turns interpose/neighbours interpose/naming interpose/image)
	@mkdir -p $(@D)
	$(CC) -o $@ $^ $(ALL_LDFLAGS) -pthread

# Compiles the ledger and the region into itself, with a hook after each atomic step.
$(OUT)/tests/test_ledger_steps: $(call shim_objects,tests/test_ledger_steps tests/support log limit/bucket limit/control limit/settle)
	@mkdir -p $(@D)
	$(CC) -o $@ $^ $(ALL_LDFLAGS) -pthread

TESTS += $(OUT)/tests/test_ledger_steps

# Provides the functions that gates lead to.
$(OUT)/tests/test_gate: $(call shim_objects,tests/test_gate tests/support interpose/gate-asm)
	@mkdir -p $(@D)
	$(CC) -o $@ $^ $(ALL_LDFLAGS) -pthread

TESTS += $(OUT)/tests/test_gate

# Run the built front on the built simulated driver, as a program in a container would.
FRONT_TESTS := test_front_threads test_cancel test_fork_early
TESTS += $(patsubst %,$(OUT)/tests/%,$(FRONT_TESTS))

$(patsubst %,$(OUT)/tests/%,$(FRONT_TESTS)): $(OUT)/tests/%: $(OUT)/obj/tests/%.o $(call shim_objects,tests/unpacked tests/support)
	@mkdir -p $(@D)
	$(CC) -o $@ $^ $(ALL_LDFLAGS) -pthread -ldl

# The same, on a driver that calls back into the program.
$(OUT)/tests/libcalling.so: $(call shim_objects,tests/calling_driver)
	@mkdir -p $(@D)
	$(CC) -o $@ -shared -Wl,-soname,libcuda.so.1 $^ $(ALL_LDFLAGS) -ldl

$(OUT)/tests/test_locks: $(call shim_objects,tests/test_locks tests/unpacked tests/support) | $(OUT)/tests/libcalling.so
	@mkdir -p $(@D)
	$(CC) -o $@ $(filter %.o,$^) $(ALL_LDFLAGS) -pthread -ldl

TESTS += $(OUT)/tests/test_locks
