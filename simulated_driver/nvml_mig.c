/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_mig.c - Multi-Instance GPU through NVML: the mode, profiles, GPU instances, compute instances and MIG device handles.
 *
 * mig.c decides what fits where; here are permissions, the mutex, versions of structs, and the rule that nothing in use is taken away: an
 * instance with CUDA contexts is in use, and the mode does not change while there are clients. */
#include <stdio.h>
#include <string.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

/* MIG in force on this GPU? */
static nvmlReturn_t require_mig(const struct sim_target *t)
{
	return atomic_load(&t->mig.enabled) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static bool gi_present(const struct sim_target *t, uint32_t id)
{
	return atomic_load(&t->mig.gpu_instances[id].present);
}
static bool device_present(const struct sim_target *t, uint32_t index)
{
	return atomic_load(&t->mig.devices[index].present);
}

/* ---- the mode ---- */

NVML_API nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned int *current, unsigned int *pending)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(current && pending);
	REQUIRE(t.hardware->mig_family != SIM_MIG_NONE, NVML_ERROR_NOT_SUPPORTED);
	*current = atomic_load(&t.mig.enabled);
	*pending = atomic_load(&t.mig.pending);
	return NVML_SUCCESS;
}

/* The change itself succeeds; `activation` says whether it is in force. With clients on the GPU it waits for the next reset, or for the
 * next request that finds the GPU idle. Leaving the mode removes the instances. */
NVML_API nvmlReturn_t nvmlDeviceSetMigMode(nvmlDevice_t device, unsigned int mode, nvmlReturn_t *activation)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(activation && (mode == NVML_DEVICE_MIG_DISABLE || mode == NVML_DEVICE_MIG_ENABLE));
	REQUIRE(t.hardware->mig_family != SIM_MIG_NONE, NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	struct sim_mig *mig = &t.gpu->mig;
	sim_lock(t.state);
	if (atomic_load(&mig->enabled) == mode || sim_gpu_contexts(t.state, t.index, SIM_MIG_ANY_DEVICE) == 0) {
		sim_mig_set_mode(mig, mode);
		*activation = NVML_SUCCESS;
	} else {
		atomic_store(&mig->pending, mode);
		*activation = NVML_ERROR_IN_USE;
	}
	sim_unlock(t.state);
	sim_ring_bell(t.state);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned int *count)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count);
	*count = t.hardware->mig_family == SIM_MIG_NONE ? 0 : t.hardware->mig_family == SIM_MIG_4_SLICES ? 4 : SIM_MIG_MAX_DEVICES;
	return NVML_SUCCESS;
}

/* ---- GPU instance profiles ---- */

/* As nvidia-smi prints it, which adds nothing to the name. */
static void name_profile(const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t compute_slices,
			 char name[NVML_DEVICE_NAME_V2_BUFFER_SIZE])
{
	static const char kind[] = "MIG ";
	size_t length = sizeof kind - 1;
	memset(name, 0, NVML_DEVICE_NAME_V2_BUFFER_SIZE);
	memcpy(name, kind, length);
	sim_mig_profile_name(gpu, profile, compute_slices, name + length, NVML_DEVICE_NAME_V2_BUFFER_SIZE - length);
}

static void describe_profile(const struct sim_target *t, const struct sim_mig_profile *profile, nvmlGpuInstanceProfileInfo_v3_t *info)
{
	struct sim_mig_engines engines = sim_mig_profile_engines(t->hardware, profile);
	info->id = profile->id;
	info->sliceCount = profile->compute_slices;
	info->instanceCount = profile->max_count;
	info->multiprocessorCount = sim_mig_profile_sm_count(t->hardware, profile);
	info->copyEngineCount = engines.copy;
	info->decoderCount = engines.decoder;
	info->encoderCount = engines.encoder;
	info->jpegCount = engines.jpeg;
	info->ofaCount = engines.ofa;
	info->memorySizeMB = sim_mig_profile_memory_bytes(t->hardware, profile) >> 20;
	info->capabilities = 0;     /* no P2P between MIG instances */
	name_profile(t->hardware, profile, profile->compute_slices, info->name);
}

/* Profiles can be queried before the mode is on. An index that exists in NVML but not on this GPU is not supported. */
static nvmlReturn_t profile_by_index(const struct sim_target *t, unsigned int index, const struct sim_mig_profile **profile)
{
	REQUIRE_ARGUMENT(index < NVML_GPU_INSTANCE_PROFILE_COUNT);
	*profile = sim_mig_profile_by_nvml_index(t->hardware, index);
	return *profile ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t profile_by_id(const struct sim_target *t, unsigned int id, const struct sim_mig_profile **profile)
{
	REQUIRE(t->hardware->mig_family != SIM_MIG_NONE, NVML_ERROR_NOT_SUPPORTED);
	*profile = sim_mig_profile_by_id(t->hardware, id);
	return *profile ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfo(nvmlDevice_t device, unsigned int index, nvmlGpuInstanceProfileInfo_t *info)
{
	const struct sim_mig_profile *profile;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(info);
	nvmlReturn_t status = profile_by_index(&t, index, &profile);
	REQUIRE(status == NVML_SUCCESS, status);
	nvmlGpuInstanceProfileInfo_v3_t full;
	describe_profile(&t, profile, &full);
	*info = (nvmlGpuInstanceProfileInfo_t){ full.id,
						0,
						full.sliceCount,
						full.instanceCount,
						full.multiprocessorCount,
						full.copyEngineCount,
						full.decoderCount,
						full.encoderCount,
						full.jpegCount,
						full.ofaCount,
						full.memorySizeMB };
	return NVML_SUCCESS;
}

/* Versions 2 and 3 have the same size and different layouts; the version word distinguishes them. */
static nvmlReturn_t fill_profile_info(const struct sim_target *t, const struct sim_mig_profile *profile,
				      nvmlGpuInstanceProfileInfo_v2_t *info)
{
	nvmlGpuInstanceProfileInfo_v3_t full;
	describe_profile(t, profile, &full);
	if (info->version == NVML_VERSION_WORD(nvmlGpuInstanceProfileInfo_v3_t, 3)) {
		full.version = info->version;
		memcpy(info, &full, sizeof full);
		return NVML_SUCCESS;
	}
	REQUIRE(info->version == NVML_VERSION_WORD(nvmlGpuInstanceProfileInfo_v2_t, 2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	*info = (nvmlGpuInstanceProfileInfo_v2_t){ info->version,
						   full.id,
						   0,
						   full.sliceCount,
						   full.instanceCount,
						   full.multiprocessorCount,
						   full.copyEngineCount,
						   full.decoderCount,
						   full.encoderCount,
						   full.jpegCount,
						   full.ofaCount,
						   full.memorySizeMB,
						   "" };
	memcpy(info->name, full.name, sizeof info->name);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoV(nvmlDevice_t device, unsigned int index, nvmlGpuInstanceProfileInfo_v2_t *info)
{
	const struct sim_mig_profile *profile;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(info);
	nvmlReturn_t status = profile_by_index(&t, index, &profile);
	return status == NVML_SUCCESS ? fill_profile_info(&t, profile, info) : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceProfileInfoByIdV(nvmlDevice_t device, unsigned int id, nvmlGpuInstanceProfileInfo_v2_t *info)
{
	const struct sim_mig_profile *profile;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(info);
	nvmlReturn_t status = profile_by_id(&t, id, &profile);
	return status == NVML_SUCCESS ? fill_profile_info(&t, profile, info) : status;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements_v2(nvmlDevice_t device, unsigned int id,
								    nvmlGpuInstancePlacement_t *placements, unsigned int *count)
{
	const struct sim_mig_profile *profile;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count);
	nvmlReturn_t status = profile_by_id(&t, id, &profile);
	REQUIRE(status == NVML_SUCCESS, status);
	unsigned int room = *count;
	*count = profile->n_starts;
	if (!placements)
		return NVML_SUCCESS;
	REQUIRE(profile->n_starts <= room, NVML_ERROR_INSUFFICIENT_SIZE);
	for (uint32_t i = 0; i < profile->n_starts; i++)
		placements[i] = (nvmlGpuInstancePlacement_t){ profile->starts[i], profile->memory_slices };
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstancePossiblePlacements(nvmlDevice_t device, unsigned int id,
								 nvmlGpuInstancePlacement_t *placements, unsigned int *count)
{
	return nvmlDeviceGetGpuInstancePossiblePlacements_v2(device, id, placements, count);
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceRemainingCapacity(nvmlDevice_t device, unsigned int id, unsigned int *count)
{
	const struct sim_mig_profile *profile;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(count);
	REQUIRE(require_mig(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	nvmlReturn_t status = profile_by_id(&t, id, &profile);
	REQUIRE(status == NVML_SUCCESS, status);
	*count = sim_mig_remaining_capacity(&t.mig, t.hardware, profile);
	return NVML_SUCCESS;
}

/* ---- GPU instances ---- */

static nvmlReturn_t answer_handle(const struct sim_target *t, enum sim_handle_kind kind, uint32_t id, void **handle)
{
	*handle = sim_nvml_handle(t, kind, id);
	return *handle ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

/* `start` NULL: where the driver likes it. */
static nvmlReturn_t create_gpu_instance(struct sim_target *t, unsigned int profile_id, const unsigned int *start, unsigned int size,
					nvmlGpuInstance_t *instance)
{
	const struct sim_mig_profile *profile;
	REQUIRE_ARGUMENT(instance);
	REQUIRE(require_mig(t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	nvmlReturn_t status = profile_by_id(t, profile_id, &profile);
	REQUIRE(status == NVML_SUCCESS, status);
	uint32_t id = 0, at = start ? *start : 0;
	REQUIRE_ARGUMENT(!start || size == profile->memory_slices);
	sim_lock(t->state);
	struct sim_mig *mig = &t->gpu->mig;
	bool room = atomic_load(&mig->enabled) &&
		    (start ? sim_mig_fits(mig, t->hardware, profile, at) : sim_mig_choose_start(mig, t->hardware, profile, &at));
	if (room)
		id = sim_mig_create_gpu_instance(mig, t->hardware, profile, at);
	sim_mig_snapshot(mig, &t->mig);
	sim_unlock(t->state);
	REQUIRE(room, NVML_ERROR_INSUFFICIENT_RESOURCES);
	sim_ring_bell(t->state);
	return answer_handle(t, SIM_HANDLE_GPU_INSTANCE, id, (void **)instance);
}

NVML_API nvmlReturn_t nvmlDeviceCreateGpuInstance(nvmlDevice_t device, unsigned int profile_id, nvmlGpuInstance_t *instance)
{
	TARGET(sim_nvml_gpu, device);
	return create_gpu_instance(&t, profile_id, NULL, 0, instance);
}

NVML_API nvmlReturn_t nvmlDeviceCreateGpuInstanceWithPlacement(nvmlDevice_t device, unsigned int profile_id,
							       const nvmlGpuInstancePlacement_t *placement, nvmlGpuInstance_t *instance)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(placement);
	return create_gpu_instance(&t, profile_id, &placement->start, placement->size, instance);
}

NVML_API nvmlReturn_t nvmlGpuInstanceDestroy(nvmlGpuInstance_t instance)
{
	struct sim_target t;
	uint32_t id;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_GPU_INSTANCE, &t, &id);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	sim_lock(t.state);
	if (!sim_nvml_still_there_locked(&t, SIM_HANDLE_GPU_INSTANCE, id))
		status = NVML_ERROR_NOT_FOUND;
	else if (sim_mig_count_compute_instances(&t.gpu->mig, id) > 0)
		status = NVML_ERROR_IN_USE;
	else
		sim_mig_destroy_gpu_instance(&t.gpu->mig, id);
	sim_unlock(t.state);
	REQUIRE(status == NVML_SUCCESS, status);
	sim_ring_bell(t.state);
	return NVML_SUCCESS;
}

/* The caller's array has room for the profile's maximum of instances; NVML passes no size. */
NVML_API nvmlReturn_t nvmlDeviceGetGpuInstances(nvmlDevice_t device, unsigned int profile_id, nvmlGpuInstance_t *instances,
						unsigned int *count)
{
	const struct sim_mig_profile *profile;
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(instances && count);
	REQUIRE(require_mig(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	nvmlReturn_t status = profile_by_id(&t, profile_id, &profile);
	*count = 0;
	for (uint32_t id = 0; status == NVML_SUCCESS && id < SIM_MIG_MAX_GPU_INSTANCES; id++)
		if (gi_present(&t, id) && t.mig.gpu_instances[id].profile_id == profile_id)
			status = answer_handle(&t, SIM_HANDLE_GPU_INSTANCE, id, (void **)&instances[(*count)++]);
	return status;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceById(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(instance);
	REQUIRE(require_mig(&t) == NVML_SUCCESS, NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(id < SIM_MIG_MAX_GPU_INSTANCES && gi_present(&t, id), NVML_ERROR_NOT_FOUND);
	return answer_handle(&t, SIM_HANDLE_GPU_INSTANCE, id, (void **)instance);
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetInfo(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info)
{
	struct sim_target t;
	uint32_t id;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_GPU_INSTANCE, &t, &id);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(info);
	const struct sim_gpu_instance *gi = &t.mig.gpu_instances[id];
	*info = (nvmlGpuInstanceInfo_t){ sim_nvml_gpu_handle(t.index), id, gi->profile_id, { gi->placement_start, gi->placement_size } };
	return NVML_SUCCESS;
}

/* ---- compute instance profiles ---- */

static nvmlReturn_t describe_ci_profile(nvmlGpuInstance_t instance, unsigned int profile, unsigned int engine_profile,
					nvmlComputeInstanceProfileInfo_v3_t *info)
{
	struct sim_target t;
	uint32_t id;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_GPU_INSTANCE, &t, &id);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(profile < NVML_COMPUTE_INSTANCE_PROFILE_COUNT && engine_profile < NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_COUNT);
	const struct sim_gpu_instance *gi = &t.mig.gpu_instances[id];
	const struct sim_mig_profile *gi_profile = sim_mig_profile_by_id(t.hardware, gi->profile_id);
	uint32_t slices = sim_mig_ci_slices(gi, profile);   /* profile IDs of compute instances are NVML's indices */
	REQUIRE(slices, NVML_ERROR_NOT_SUPPORTED);
	struct sim_mig_engines engines = sim_mig_profile_engines(t.hardware, gi_profile);
	*info = (nvmlComputeInstanceProfileInfo_v3_t){
		.id = profile,
		.sliceCount = slices,
		.instanceCount = gi->compute_slices / slices,
		.multiprocessorCount = sim_mig_ci_sm_count(gi, slices),
		.sharedCopyEngineCount = engines.copy,
		.sharedDecoderCount = engines.decoder,
		.sharedEncoderCount = engines.encoder,
		.sharedJpegCount = engines.jpeg,
		.sharedOfaCount = engines.ofa,
	};
	name_profile(t.hardware, gi_profile, slices, info->name);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfo(nvmlGpuInstance_t instance, unsigned int profile,
								   unsigned int engine_profile, nvmlComputeInstanceProfileInfo_t *info)
{
	nvmlComputeInstanceProfileInfo_v3_t full;
	REQUIRE_ARGUMENT(info);
	nvmlReturn_t status = describe_ci_profile(instance, profile, engine_profile, &full);
	REQUIRE(status == NVML_SUCCESS, status);
	*info = (nvmlComputeInstanceProfileInfo_t){ full.id,
						    full.sliceCount,
						    full.instanceCount,
						    full.multiprocessorCount,
						    full.sharedCopyEngineCount,
						    full.sharedDecoderCount,
						    full.sharedEncoderCount,
						    full.sharedJpegCount,
						    full.sharedOfaCount };
	return NVML_SUCCESS;
}

/* Version 3 is version 2 with one word more at the end. */
NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceProfileInfoV(nvmlGpuInstance_t instance, unsigned int profile,
								    unsigned int engine_profile, nvmlComputeInstanceProfileInfo_v2_t *info)
{
	nvmlComputeInstanceProfileInfo_v3_t full;
	REQUIRE_ARGUMENT(info);
	nvmlReturn_t status = describe_ci_profile(instance, profile, engine_profile, &full);
	REQUIRE(status == NVML_SUCCESS, status);
	full.version = info->version;
	if (info->version == NVML_VERSION_WORD(nvmlComputeInstanceProfileInfo_v3_t, 3)) {
		memcpy((void *)info, &full, sizeof full);
		return NVML_SUCCESS;
	}
	REQUIRE(info->version == NVML_VERSION_WORD(nvmlComputeInstanceProfileInfo_v2_t, 2), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	memcpy(info, &full, sizeof *info);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceRemainingCapacity(nvmlGpuInstance_t instance, unsigned int profile_id,
									 unsigned int *count)
{
	struct sim_target t;
	uint32_t id;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_GPU_INSTANCE, &t, &id);
	REQUIRE(status == NVML_SUCCESS, status);
	uint32_t slices = sim_mig_ci_slices(&t.mig.gpu_instances[id], profile_id);
	REQUIRE_ARGUMENT(count && slices);
	*count = sim_mig_ci_remaining_capacity(&t.mig, id, slices);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstancePossiblePlacements(nvmlGpuInstance_t instance, unsigned int profile_id,
									  nvmlComputeInstancePlacement_t *placements, unsigned int *count)
{
	struct sim_target t;
	uint32_t id;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_GPU_INSTANCE, &t, &id);
	REQUIRE(status == NVML_SUCCESS, status);
	const struct sim_gpu_instance *gi = &t.mig.gpu_instances[id];
	uint32_t slices = sim_mig_ci_slices(gi, profile_id);
	REQUIRE_ARGUMENT(count && slices);
	unsigned int room = *count;
	*count = gi->compute_slices - slices + 1;
	if (!placements)
		return NVML_SUCCESS;
	REQUIRE(*count <= room, NVML_ERROR_INSUFFICIENT_SIZE);
	for (unsigned int start = 0; start < *count; start++)
		placements[start] = (nvmlComputeInstancePlacement_t){ start, slices };
	return NVML_SUCCESS;
}

/* ---- compute instances ---- */

/* `start` NULL: the first that fits. */
static nvmlReturn_t create_compute_instance(nvmlGpuInstance_t instance, unsigned int profile_id, const unsigned int *start,
					    unsigned int size, nvmlComputeInstance_t *out)
{
	struct sim_target t;
	uint32_t id;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_GPU_INSTANCE, &t, &id);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(out);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	struct sim_mig *mig = &t.gpu->mig;
	uint32_t slices = sim_mig_ci_slices(&t.mig.gpu_instances[id], profile_id), at = start ? *start : 0;
	REQUIRE_ARGUMENT(slices && (!start || size == slices));
	int index = -1;
	sim_lock(t.state);
	bool there = sim_nvml_still_there_locked(&t, SIM_HANDLE_GPU_INSTANCE, id);
	while (!start && at < t.mig.gpu_instances[id].compute_slices && !sim_mig_ci_fits(mig, id, slices, at))
		at++;
	if (there && sim_mig_ci_fits(mig, id, slices, at))
		index = sim_mig_create_compute_instance(mig, t.hardware, id, profile_id, at);
	sim_mig_snapshot(mig, &t.mig);
	sim_unlock(t.state);
	REQUIRE(there, NVML_ERROR_NOT_FOUND);
	REQUIRE(index >= 0, NVML_ERROR_INSUFFICIENT_RESOURCES);
	sim_ring_bell(t.state);
	return answer_handle(&t, SIM_HANDLE_COMPUTE_INSTANCE, (uint32_t)index, (void **)out);
}

NVML_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstance(nvmlGpuInstance_t instance, unsigned int profile_id, nvmlComputeInstance_t *out)
{
	return create_compute_instance(instance, profile_id, NULL, 0, out);
}

NVML_API nvmlReturn_t nvmlGpuInstanceCreateComputeInstanceWithPlacement(nvmlGpuInstance_t instance, unsigned int profile_id,
									const nvmlComputeInstancePlacement_t *placement,
									nvmlComputeInstance_t *out)
{
	REQUIRE_ARGUMENT(placement);
	return create_compute_instance(instance, profile_id, &placement->start, placement->size, out);
}

NVML_API nvmlReturn_t nvmlComputeInstanceDestroy(nvmlComputeInstance_t instance)
{
	struct sim_target t;
	uint32_t index;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_COMPUTE_INSTANCE, &t, &index);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE(sim_nvml_require_admin() == NVML_SUCCESS, NVML_ERROR_NO_PERMISSION);
	sim_lock(t.state);
	sim_reap_locked(t.state);
	if (!sim_nvml_still_there_locked(&t, SIM_HANDLE_COMPUTE_INSTANCE, index))
		status = NVML_ERROR_NOT_FOUND;
	else if (sim_gpu_contexts(t.state, t.index, (int)index) > 0)
		status = NVML_ERROR_IN_USE;
	else
		sim_mig_destroy_compute_instance(&t.gpu->mig, index);
	sim_unlock(t.state);
	REQUIRE(status == NVML_SUCCESS, status);
	sim_ring_bell(t.state);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstances(nvmlGpuInstance_t instance, unsigned int profile_id,
							 nvmlComputeInstance_t *instances, unsigned int *count)
{
	struct sim_target t;
	uint32_t id;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_GPU_INSTANCE, &t, &id);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(instances && count && sim_mig_ci_slices(&t.mig.gpu_instances[id], profile_id));
	*count = 0;
	for (uint32_t i = 0; status == NVML_SUCCESS && i < SIM_MIG_MAX_DEVICES; i++) {
		const struct sim_compute_instance *ci = &t.mig.devices[i];
		if (device_present(&t, i) && ci->gpu_instance_id == id && ci->profile_id == profile_id)
			status = answer_handle(&t, SIM_HANDLE_COMPUTE_INSTANCE, i, (void **)&instances[(*count)++]);
	}
	return status;
}

NVML_API nvmlReturn_t nvmlGpuInstanceGetComputeInstanceById(nvmlGpuInstance_t instance, unsigned int ci_id, nvmlComputeInstance_t *out)
{
	struct sim_target t;
	uint32_t id;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_GPU_INSTANCE, &t, &id);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(out);
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES; i++) {
		const struct sim_compute_instance *ci = &t.mig.devices[i];
		if (device_present(&t, i) && ci->gpu_instance_id == id && ci->id == ci_id)
			return answer_handle(&t, SIM_HANDLE_COMPUTE_INSTANCE, i, (void **)out);
	}
	return NVML_ERROR_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo_v2(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
	struct sim_target t;
	uint32_t index;
	nvmlReturn_t status = sim_nvml_instance(instance, SIM_HANDLE_COMPUTE_INSTANCE, &t, &index);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(info);
	const struct sim_compute_instance *ci = &t.mig.devices[index];
	*info = (nvmlComputeInstanceInfo_t){
		sim_nvml_gpu_handle(t.index), NULL, ci->id, ci->profile_id, { ci->placement_start, ci->compute_slices }
	};
	return answer_handle(&t, SIM_HANDLE_GPU_INSTANCE, ci->gpu_instance_id, (void **)&info->gpuInstance);
}

/* The first version lacked the placement; that is all that differs. */
NVML_API nvmlReturn_t nvmlComputeInstanceGetInfo(nvmlComputeInstance_t instance, nvmlComputeInstanceInfo_t *info)
{
	nvmlComputeInstanceInfo_t full;
	REQUIRE_ARGUMENT(info);
	nvmlReturn_t status = nvmlComputeInstanceGetInfo_v2(instance, &full);
	if (status == NVML_SUCCESS)
		memcpy(info, &full, offsetof(nvmlComputeInstanceInfo_t, placement));
	return status;
}

/* ---- MIG devices ---- */

NVML_API nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig_device)
{
	TARGET(sim_nvml_gpu, device);
	REQUIRE_ARGUMENT(mig_device && index < SIM_MIG_MAX_DEVICES);
	REQUIRE(t.hardware->mig_family != SIM_MIG_NONE, NVML_ERROR_NOT_SUPPORTED);
	REQUIRE(device_present(&t, index) && sim_nvml_mig_visible(&t.mig.devices[index]), NVML_ERROR_NOT_FOUND);
	return answer_handle(&t, SIM_HANDLE_MIG_DEVICE, index, (void **)mig_device);
}

NVML_API nvmlReturn_t nvmlDeviceGetDeviceHandleFromMigDeviceHandle(nvmlDevice_t mig_device, nvmlDevice_t *device)
{
	TARGET(sim_nvml_target, mig_device);
	REQUIRE_ARGUMENT(device && t.mig_device != SIM_WHOLE_GPU);
	*device = sim_nvml_gpu_handle(t.index);
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceIsMigDeviceHandle(nvmlDevice_t device, unsigned int *is_mig_device)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(is_mig_device);
	*is_mig_device = t.mig_device != SIM_WHOLE_GPU;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned int *id)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(id);
	REQUIRE(t.mig_device != SIM_WHOLE_GPU, NVML_ERROR_NOT_SUPPORTED);
	*id = t.mig.devices[t.mig_device].gpu_instance_id;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned int *id)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(id);
	REQUIRE(t.mig_device != SIM_WHOLE_GPU, NVML_ERROR_NOT_SUPPORTED);
	*id = t.mig.devices[t.mig_device].id;
	return NVML_SUCCESS;
}

/* Only MIG devices have attributes. */
NVML_API nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	TARGET(sim_nvml_target, device);
	REQUIRE_ARGUMENT(attributes);
	REQUIRE(t.mig_device != SIM_WHOLE_GPU, NVML_ERROR_NOT_SUPPORTED);
	const struct sim_compute_instance *ci = &t.mig.devices[t.mig_device];
	const struct sim_gpu_instance *gi = &t.mig.gpu_instances[ci->gpu_instance_id];
	struct sim_mig_engines engines = sim_mig_profile_engines(t.hardware, sim_mig_profile_by_id(t.hardware, gi->profile_id));
	*attributes = (nvmlDeviceAttributes_t){
		.multiprocessorCount = ci->sm_count,
		.sharedCopyEngineCount = engines.copy,
		.sharedDecoderCount = engines.decoder,
		.sharedEncoderCount = engines.encoder,
		.sharedJpegCount = engines.jpeg,
		.sharedOfaCount = engines.ofa,
		.gpuInstanceSliceCount = gi->compute_slices,
		.computeInstanceSliceCount = ci->compute_slices,
		.memorySizeMB = gi->memory_bytes >> 20,
	};
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlDeviceGetAttributes(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes)
{
	return nvmlDeviceGetAttributes_v2(device, attributes);
}
