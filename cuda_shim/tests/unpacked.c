/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/unpacked.h"

#include <dlfcn.h>
#include <limits.h>
#include <stdarg.h>
#include <string.h>

#include "nvml_abi.h"

#define LIBRARIES "/usr/lib/x86_64-linux-gnu"
#define DRIVER "/run/aliquot/driver"
#define PATH_BYTES (PATH_MAX + 128)

static char root[PATH_MAX];

static void run(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void run(const char *format, ...)
{
	char command[2 * PATH_MAX];
	va_list arguments;

	va_start(arguments, format);
	vsnprintf(command, sizeof(command), format, arguments);
	va_end(arguments);
	CHECK(system(command) == 0);
}

static void *open_library(const char *directory, const char *name)
{
	char path[2 * PATH_BYTES];

	snprintf(path, sizeof(path), "%s/%s", directory, name);
	void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!library) {
		fprintf(stderr, "%s\n", dlerror());
		exit(1);
	}
	return library;
}

/* The UUID of the node's first GPU, as the driver's own NVML says. */
static void first_uuid(const char *build, char *uuid)
{
	char directory[PATH_BYTES];

	snprintf(directory, sizeof(directory), "%s/lib/sim", build);
	void *nvml = open_library(directory, "libnvidia-ml.so.1");
	nvmlReturn_t (*init)(void) = (nvmlReturn_t (*)(void))dlsym(nvml, "nvmlInit_v2");
	nvmlReturn_t (*handle)(unsigned,
			       nvmlDevice_t *) = (nvmlReturn_t (*)(unsigned, nvmlDevice_t *))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2");
	nvmlReturn_t (*get)(nvmlDevice_t, char *, unsigned) = (nvmlReturn_t (*)(nvmlDevice_t, char *, unsigned))dlsym(nvml,
														      "nvmlDeviceGetUUID");
	nvmlDevice_t device;
	CHECK(init && handle && get);
	CHECK(init() == NVML_SUCCESS && handle(0, &device) == NVML_SUCCESS && get(device, uuid, AQ_UUID_BYTES) == NVML_SUCCESS);
}

const char *unpacked_container(const char *build, uint64_t memory_bytes, struct support_page *page)
{
	char path[PATH_BYTES];

	snprintf(root, sizeof(root), "%s", support_directory());
	run("'%s/bin/aliquot-sim' init h200x8 --dir '%s/node' > /dev/null", build, root);
	snprintf(path, sizeof(path), "%s/node", root);
	CHECK(setenv("ALIQUOT_SIM_DIR", path, 1) == 0);
	run("mkdir -p '%s" LIBRARIES "' '%s" DRIVER "'", root, root);
	run("cp '%s/lib/shim/libcuda.so.1' '%s/lib/shim/libnvidia-ml.so.1' '%s" LIBRARIES "/'", build, build, root);
	run("cp '%s/lib/sim/libcuda.so.1' '%s" DRIVER "/libcuda.aliquot-driver.so.1'", build, root);
	run("cp '%s/lib/sim/libnvidia-ml.so.1' '%s" DRIVER "/libnvidia-ml.aliquot-driver.so.1'", build, root);
	support_page(page, 1, memory_bytes);
	memset(page->device[0].uuid, 0, sizeof(page->device[0].uuid));
	first_uuid(build, page->device[0].uuid);
	page->header.checksum = support_checksum(page);
	unpacked_write_limits(page);
	support_write_region();
	run("mv '%s' '%s/run/aliquot/region'", support_region(), root);
	return root;
}

void unpacked_replace_driver(const char *library)
{
	run("cp '%s' '%s" DRIVER "/libcuda.aliquot-driver.so.1'", library, root);
}

void unpacked_remove(void)
{
	run("rm -rf '%s'", root);
}

static void *open_front(const char *name)
{
	char directory[PATH_BYTES];

	snprintf(directory, sizeof(directory), "%s" LIBRARIES, root);
	return open_library(directory, name);
}

void *unpacked_front(void)
{
	return open_front("libcuda.so.1");
}

void *unpacked_nvml_front(void)
{
	return open_front("libnvidia-ml.so.1");
}

void *unpacked_driver(void)
{
	char directory[PATH_BYTES];

	snprintf(directory, sizeof(directory), "%s" DRIVER, root);
	return open_library(directory, "libcuda.aliquot-driver.so.1");
}

void unpacked_write_limits(const struct support_page *page)
{
	char path[PATH_BYTES];

	snprintf(path, sizeof(path), "%s/run/aliquot/limits", root);
	support_write_limits(path, page);
}
