# SPDX-License-Identifier: Apache-2.0
# aliquot-cuda-client: the CUDA program that demo, tests and benchmarks run in containers. Links nothing of ours.

client_objects := $(patsubst %,$(OUT)/obj/client/%.o,driver driver_error holdings work main)

$(OUT)/bin/aliquot-cuda-client: $(client_objects)
	@mkdir -p $(@D)
	$(CC) -o $@ $^ $(ALL_LDFLAGS) -ldl

$(OUT)/lib/client/libaliquot-client-lookup.so: $(OUT)/obj/client/lookup.o
	@mkdir -p $(@D)
	$(CC) -shared -o $@ $^ $(ALL_LDFLAGS) -ldl

PROGRAMS += $(OUT)/bin/aliquot-cuda-client
LIBS += $(OUT)/lib/client/libaliquot-client-lookup.so
