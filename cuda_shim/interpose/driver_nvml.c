/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/driver_nvml.h"

#include <dlfcn.h>

#include "interpose/object.h"

#define NVML_DRIVER_NAME "libnvidia-ml.aliquot-driver.so.1"
#define NVML_SONAME "libnvidia-ml.so.1"

/* The loader's dlopen, found in whichever of libc's libraries has it. */
static void *(*find_dlopen(void))(const char *, int)
{
	static const char *const libraries[] = { "libc.so.6", "libdl.so.2" };
	struct aq_object object;
	void *address = NULL;

	for (unsigned i = 0; i < 2 && !address; i++)
		if (aq_object_find(libraries[i], &object))
			address = aq_object_symbol(&object, "dlopen");
	return (void *(*)(const char *, int))address;
}

bool aq_driver_nvml_load(struct aq_driver_nvml *nvml)
{
	void *(*open_library)(const char *, int) = find_dlopen();
	struct aq_object object;

	if (!open_library)
		return false;
	/* By the common name first. Where our front has it, the front must be ahead of the driver's library in the loader's list: both have
	 * that SONAME, and a program that opens NVML later is given the first. */
	bool is_open = open_library(NVML_SONAME, RTLD_NOW) != NULL;
	is_open |= open_library(NVML_DRIVER_NAME, RTLD_NOW) != NULL;
	if (!is_open)
		return false;
	/* The real library, never our front: that one shows what the container may see. */
	if (!aq_object_find(NVML_DRIVER_NAME, &object) && !aq_object_find(NVML_SONAME, &object))
		return false;
	nvml->init = (nvmlReturn_t (*)(void))aq_object_symbol(&object, "nvmlInit_v2");
	nvml->shutdown = (nvmlReturn_t (*)(void))aq_object_symbol(&object, "nvmlShutdown");
	nvml->by_uuid = (nvmlReturn_t (*)(const char *, nvmlDevice_t *))aq_object_symbol(&object, "nvmlDeviceGetHandleByUUID");
	nvml->memory = (nvmlReturn_t (*)(nvmlDevice_t, nvmlMemory_t *))aq_object_symbol(&object, "nvmlDeviceGetMemoryInfo");
	nvml->processes = (nvmlReturn_t (*)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_v2_t *))aq_object_symbol(
		&object, "nvmlDeviceGetComputeRunningProcesses_v3");
	nvml->mps_processes = (nvmlReturn_t (*)(nvmlDevice_t, unsigned int *, nvmlProcessInfo_v2_t *))aq_object_symbol(
		&object, "nvmlDeviceGetMPSComputeRunningProcesses_v3");
	nvml->utilization = (nvmlReturn_t (*)(nvmlDevice_t, nvmlProcessUtilizationSample_t *, unsigned int *,
					      unsigned long long))aq_object_symbol(&object, "nvmlDeviceGetProcessUtilization");
	return nvml->init && nvml->shutdown && nvml->by_uuid && nvml->memory;
}
