# SPDX-License-Identifier: Apache-2.0
# The simulated runtime: libcudart.so of each version in RUNTIME_VERSIONS, from one set of sources and one table of names. Objects are compiled
# once per major version; minor versions differ in version.c. Included by cuda_shim/Makefile; no release image has it.

RUNTIME := $(ROOT)/simulated_runtime

# 13.2 is PyTorch 2.15's, 12.9 the last of CUDA 12, 13.5 the newest of CUDA 13. Two share a file name, so each has a folder.
RUNTIME_VERSIONS := 12.9 13.2 13.5

RUNTIME_SOURCES := driver error context registry launch memory copy library function device forward graph

runtime_major = $(firstword $(subst ., ,$(1)))
runtime_minor = $(lastword $(subst ., ,$(1)))
runtime_library = $(OUT)/lib/runtime/$(1)/libcudart.so.$(call runtime_major,$(1))

define runtime_major_rules
$$(OUT)/obj/simulated_runtime/$(1)/%.o: $$(RUNTIME)/%.c
	@mkdir -p $$(@D)
	$$(CC) $$(ALL_CFLAGS) -I$$(ROOT) -DRUNTIME_MAJOR=$(1) -MMD -MP -c -o $$@ $$<

# Versions of the table are numbers, so the preprocessor cannot choose lines by them: awk does.
$$(OUT)/obj/simulated_runtime/$(1)/libcudart.map: $$(RUNTIME)/names.def $$(RUNTIME)/runtime.mk
	@mkdir -p $$(@D)
	{ echo 'libcudart.so.$(1) {'; echo '  global:'; \
	  sed -n 's/^NAME(\(.*\))$$$$/\1/p' $$< | awk -F', ' '$$$$2 <= $(1) && ($$$$3 == 0 || $$$$3 >= $(1)) { print "    " $$$$1 "; " $$$$1 "_ptsz; " $$$$1 "_ptds;" }'; \
	  echo '  local: *;'; echo '};'; } > $$@.new && mv $$@.new $$@
endef
$(foreach major,$(sort $(call runtime_major,$(RUNTIME_VERSIONS)) 12 13),$(eval $(call runtime_major_rules,$(major))))

define runtime_version_rules
$$(OUT)/obj/simulated_runtime/$(1)/version.o: $$(RUNTIME)/version.c $$(RUNTIME)/runtime.mk
	@mkdir -p $$(@D)
	$$(CC) $$(ALL_CFLAGS) -I$$(ROOT) -DRUNTIME_MAJOR=$(call runtime_major,$(1)) \
	  -DRUNTIME_VERSION=$$$$(($(call runtime_major,$(1)) * 1000 + $(call runtime_minor,$(1)) * 10)) -MMD -MP -c -o $$@ $$<

$(call runtime_library,$(1)): $$(patsubst %,$$(OUT)/obj/simulated_runtime/$(call runtime_major,$(1))/%.o,$$(RUNTIME_SOURCES)) \
  $$(OUT)/obj/simulated_runtime/$(1)/version.o $$(OUT)/obj/simulated_runtime/$(call runtime_major,$(1))/libcudart.map
	@mkdir -p $$(@D)
	$$(CC) -shared -Wl,-soname,$$(@F) -Wl,--version-script=$$(filter %.map,$$^) -Wl,-Bsymbolic -Wl,-z,nodelete -Wl,--no-undefined \
	  -o $$@ $$(filter %.o,$$^) $$(ALL_LDFLAGS) -pthread -ldl

LIBS += $(call runtime_library,$(1))
endef
$(foreach version,$(RUNTIME_VERSIONS),$(eval $(call runtime_version_rules,$(version))))

# ---- tests: one set of programs for each major version; `check` runs those of 13.2, the integration test all of them, under the shim too ----

RUNTIME_TESTS := test_runtime_code test_runtime_memory test_runtime_device test_runtime_work

# $(1) is the version, $(2) the folder of its programs.
define runtime_test_rules
$$(patsubst %,$(2)/%,$$(RUNTIME_TESTS)): $(2)/%: $$(OUT)/obj/simulated_runtime/$(call runtime_major,$(1))/tests/%.o \
  $$(OUT)/obj/simulated_runtime/$(call runtime_major,$(1))/tests/client.o $$(call sim_objects,tests/harness $$(SIM_COMMON)) \
  | $(call runtime_library,$(1)) $$(OUT)/lib/sim/libcuda.so.1
	@mkdir -p $$(@D)
	$$(CC) -o $$@ $$^ $(call runtime_library,$(1)) -L$$(OUT)/lib/sim -l:libcuda.so.1 \
	  -Wl,-rpath,$(dir $(call runtime_library,$(1))) -Wl,-rpath,$$(OUT)/lib/sim $$(ALL_LDFLAGS) -pthread
endef
$(eval $(call runtime_test_rules,13.2,$(OUT)/tests))
$(eval $(call runtime_test_rules,12.9,$(OUT)/tests/runtime-12.9))

TESTS    += $(patsubst %,$(OUT)/tests/%,$(RUNTIME_TESTS))
PROGRAMS += $(patsubst %,$(OUT)/tests/runtime-12.9/%,$(RUNTIME_TESTS))
