/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/device.h"

#include <string.h>

#include "account/account.h"
#include "interpose/driver.h"

/* All written once, between the driver's cuInit and the first limited call. */
static struct aq_limits *limits;
static struct {
	unsigned char uuid[16];
	_Atomic int device;
} devices[AQ_MAX_ORDINALS];
static int device_count;

/* The UUID by which the container was granted a device: that of the MIG instance, or that of its GPU for shares of a GPU in MIG mode. The
 * newer form of the driver's call returns the instance's, the older one the GPU's. */
static CUresult learn_uuid(int ordinal, CUuuid *uuid)
{
	CUuuid of_gpu;
	CUresult result = aq_cuda.cuDeviceGetUuid_v2(uuid, ordinal);

	if (result == CUDA_ERROR_NOT_SUPPORTED)
		return aq_cuda.cuDeviceGetUuid(uuid, ordinal);
	if (result != CUDA_SUCCESS || aq_limits_find(limits, (unsigned char *)uuid->bytes) >= 0)
		return result;
	if (aq_cuda.cuDeviceGetUuid(&of_gpu, ordinal) == CUDA_SUCCESS && aq_limits_find(limits, (unsigned char *)of_gpu.bytes) >= 0)
		*uuid = of_gpu;
	return CUDA_SUCCESS;
}

CUresult aq_devices_learn(struct aq_limits *new_limits)
{
	int count = 0;
	CUresult result = aq_cuda.cuDeviceGetCount(&count);

	if (result != CUDA_SUCCESS)
		return result;
	limits = new_limits;
	device_count = count < AQ_MAX_ORDINALS ? count : AQ_MAX_ORDINALS;
	for (int i = 0; i < device_count; i++) {
		CUuuid uuid = { { 0 } };

		result = learn_uuid(i, &uuid);
		if (result != CUDA_SUCCESS)
			return result;
		memcpy(devices[i].uuid, uuid.bytes, sizeof(devices[i].uuid));
		atomic_store_explicit(&devices[i].device, aq_limits_find(limits, devices[i].uuid), memory_order_relaxed);
	}
	return CUDA_SUCCESS;
}

bool aq_device_is_only(void)
{
	return device_count == 1;
}

int aq_device_of(CUdevice ordinal)
{
	if (ordinal < 0 || ordinal >= device_count)
		return AQ_NO_DEVICE;
	int device = atomic_load_explicit(&devices[ordinal].device, memory_order_relaxed);
	if (device == AQ_NO_DEVICE) { /* it may have been granted since */
		aq_limits_refresh(limits);
		device = aq_limits_find(limits, devices[ordinal].uuid);
		atomic_store_explicit(&devices[ordinal].device, device, memory_order_relaxed);
	}
	return device;
}

const char *aq_device_uuid(int device)
{
	return device < 0 ? NULL : limits->device[device].uuid_text;
}
