/* SPDX-License-Identifier: Apache-2.0 */
/* mig.c - the profile tables and the placement rules behind mig.h. */
#include "simulated_driver/mig.h"

#include <stdio.h>
#include <string.h>

#include "nvml_abi.h"

#define MEMORY_SLICES_7 8   /* a 7-slice GPU has eight memory slices; the eighth has no compute slice of its own */
#define MEMORY_SLICES_4 4

enum { SHAPE_1G, SHAPE_1G_DOUBLE, SHAPE_2G, SHAPE_3G, SHAPE_4G, SHAPE_7G };

static const struct sim_mig_profile profiles_7[] = {
	{ NVML_GPU_INSTANCE_PROFILE_7_SLICE, 0, 7, 8, 1, SHAPE_7G, 1, { 0 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_4_SLICE, 5, 4, 4, 1, SHAPE_4G, 1, { 0 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_3_SLICE, 9, 3, 4, 2, SHAPE_3G, 2, { 0, 4 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_2_SLICE, 14, 2, 2, 3, SHAPE_2G, 3, { 0, 2, 4 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV2, 15, 1, 2, 4, SHAPE_1G_DOUBLE, 4, { 0, 2, 4, 6 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_1_SLICE, 19, 1, 1, 7, SHAPE_1G, 7, { 0, 1, 2, 3, 4, 5, 6 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, 20, 1, 1, 1, SHAPE_1G, 7, { 0, 1, 2, 3, 4, 5, 6 }, true },
};

static const struct sim_mig_profile profiles_4[] = {
	{ NVML_GPU_INSTANCE_PROFILE_4_SLICE, 0, 4, 4, 1, SHAPE_4G, 1, { 0 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_2_SLICE, 5, 2, 2, 2, SHAPE_2G, 2, { 0, 2 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_2_SLICE_REV1, 6, 2, 2, 1, SHAPE_2G, 2, { 0, 2 }, true },
	{ NVML_GPU_INSTANCE_PROFILE_1_SLICE, 14, 1, 1, 4, SHAPE_1G, 4, { 0, 1, 2, 3 }, false },
	{ NVML_GPU_INSTANCE_PROFILE_1_SLICE_REV1, 21, 1, 1, 1, SHAPE_1G, 4, { 0, 1, 2, 3 }, true },
};

static const uint32_t ci_slices[] = { 1, 2, 3, 4, 7 };  /* by compute instance profile ID */

static uint32_t memory_slices(const struct sim_gpu *gpu)
{
	return gpu->mig_family == SIM_MIG_4_SLICES ? MEMORY_SLICES_4 : MEMORY_SLICES_7;
}

static uint32_t compute_slices(const struct sim_gpu *gpu)
{
	return gpu->mig_family == SIM_MIG_4_SLICES ? 4 : 7;
}

const struct sim_mig_profile *sim_mig_profiles(const struct sim_gpu *gpu, size_t *count)
{
	switch (gpu->mig_family) {
	case SIM_MIG_7_SLICES: *count = sizeof profiles_7 / sizeof *profiles_7; return profiles_7;
	case SIM_MIG_4_SLICES: *count = sizeof profiles_4 / sizeof *profiles_4; return profiles_4;
	default: *count = 0; return NULL;
	}
}

const struct sim_mig_profile *sim_mig_profile_by_id(const struct sim_gpu *gpu, uint32_t id)
{
	size_t count;
	const struct sim_mig_profile *profiles = sim_mig_profiles(gpu, &count);
	for (size_t i = 0; i < count; i++)
		if (profiles[i].id == id)
			return &profiles[i];
	return NULL;
}

const struct sim_mig_profile *sim_mig_profile_by_nvml_index(const struct sim_gpu *gpu, uint32_t nvml_index)
{
	size_t count;
	const struct sim_mig_profile *profiles = sim_mig_profiles(gpu, &count);
	for (size_t i = 0; i < count; i++)
		if (profiles[i].nvml_index == nvml_index)
			return &profiles[i];
	return NULL;
}

const struct sim_mig_profile *sim_mig_profile_by_name(const struct sim_gpu *gpu, const char *name)
{
	size_t count;
	const struct sim_mig_profile *profiles = sim_mig_profiles(gpu, &count);
	for (size_t i = 0; i < count; i++) {
		char own[SIM_NAME_LEN];
		sim_mig_profile_name(gpu, &profiles[i], profiles[i].compute_slices, own, sizeof own);
		if (strcmp(own, name) == 0)
			return &profiles[i];
	}
	return NULL;
}

/* The GB in a profile's name is its share of the whole GPU's GiB, rounded; not what the instance can use. */
static unsigned nominal_gb(const struct sim_gpu *gpu, const struct sim_mig_profile *profile)
{
	uint64_t whole_gib = (gpu->memory_bytes + (1ull << 30) - 1) >> 30, slices = memory_slices(gpu);
	return (unsigned)((2 * whole_gib * profile->memory_slices + slices) / (2 * slices));
}

void sim_mig_profile_name(const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t ci_compute_slices, char *buffer,
			  size_t size)
{
	char prefix[16] = "";
	if (ci_compute_slices != profile->compute_slices)
		snprintf(prefix, sizeof prefix, "%uc.", ci_compute_slices);
	snprintf(buffer, size, "%s%ug.%ugb%s", prefix, profile->compute_slices, nominal_gb(gpu, profile),
		 profile->media_extension ? "+me" : "");
}

uint64_t sim_mig_profile_memory_bytes(const struct sim_gpu *gpu, const struct sim_mig_profile *profile)
{
	uint32_t size = 0;
	for (uint32_t slices = profile->memory_slices; slices > 1; slices /= 2)
		size++;
	return gpu->mig_memory_bytes[size];
}

uint32_t sim_mig_profile_sm_count(const struct sim_gpu *gpu, const struct sim_mig_profile *profile)
{
	return gpu->mig_sm_counts[profile->shape];
}

/* An A100 has five decoders and one JPEG engine for seven slices, so some instances get no decoder or no JPEG engine; an A30 has a
 * decoder for each slice and also one JPEG engine; from Hopper on every slice has its own. Each has one optical flow accelerator. */
struct sim_mig_engines sim_mig_profile_engines(const struct sim_gpu *gpu, const struct sim_mig_profile *profile)
{
	bool whole = profile->memory_slices == memory_slices(gpu);
	struct sim_mig_engines engines = { .copy = profile->compute_slices };
	if (gpu->architecture >= NVML_DEVICE_ARCH_HOPPER) {
		engines.decoder = engines.jpeg = profile->compute_slices;
		engines.ofa = whole || profile->media_extension;
		engines.copy += whole;
	} else {
		engines.jpeg = engines.ofa = whole || profile->media_extension;
		if (gpu->mig_family == SIM_MIG_4_SLICES)
			engines.decoder = profile->compute_slices;
		else
			engines.decoder = whole ? 5 : profile->media_extension ? 1 : profile->memory_slices / 2;
	}
	return engines;
}

/* GPU instance ids number a binary tree of placements: 0 the whole, 1-2 the halves, 3-6 the quarters, 7-14 the eighths. Placements that
 * overlap never exist together, so the id is unique; it is also what the driver answers on real GPUs. */
static uint32_t gpu_instance_id(const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t start)
{
	uint32_t parts = memory_slices(gpu) / profile->memory_slices;
	return parts - 1 + start / profile->memory_slices;
}

static bool present(const struct sim_gpu_instance *gi)
{
	return atomic_load_explicit(&gi->present, memory_order_acquire);
}

static bool device_present(const struct sim_compute_instance *ci)
{
	return atomic_load_explicit(&ci->present, memory_order_acquire);
}

/* What is in use on a GPU; small enough to copy, so that "what if" works on a copy. */
struct occupancy {
	uint32_t memory_mask;
	uint32_t compute_slices;
	struct sim_mig_engines engines;
};

static uint32_t placement_mask(uint32_t start, uint32_t size)
{
	return ((1u << size) - 1) << start;
}

static void occupy(struct occupancy *occupancy, const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t start)
{
	struct sim_mig_engines taken = sim_mig_profile_engines(gpu, profile), *engines = &occupancy->engines;
	occupancy->memory_mask |= placement_mask(start, profile->memory_slices);
	occupancy->compute_slices += profile->compute_slices;
	engines->decoder += taken.decoder;
	engines->encoder += taken.encoder;
	engines->jpeg += taken.jpeg;
	engines->ofa += taken.ofa;
}

/* Media engines are not shared between instances, and the instance of the whole GPU has them all. */
static bool engines_suffice(const struct sim_gpu *gpu, const struct sim_mig_engines *engines)
{
	size_t count;
	struct sim_mig_engines all = sim_mig_profile_engines(gpu, sim_mig_profiles(gpu, &count));
	return engines->decoder <= all.decoder && engines->encoder <= all.encoder && engines->jpeg <= all.jpeg && engines->ofa <= all.ofa;
}

static struct occupancy occupancy_of(const struct sim_mig *mig, const struct sim_gpu *gpu)
{
	struct occupancy occupancy = { 0 };
	for (uint32_t id = 0; id < SIM_MIG_MAX_GPU_INSTANCES; id++) {
		const struct sim_gpu_instance *gi = &mig->gpu_instances[id];
		if (present(gi))
			occupy(&occupancy, gpu, sim_mig_profile_by_id(gpu, gi->profile_id), gi->placement_start);
	}
	return occupancy;
}

static bool fits(struct occupancy occupancy, const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t start)
{
	bool allowed = false;
	for (uint32_t i = 0; i < profile->n_starts; i++)
		allowed = allowed || profile->starts[i] == start;
	if (!allowed || occupancy.memory_mask & placement_mask(start, profile->memory_slices))
		return false;
	occupy(&occupancy, gpu, profile, start);
	return occupancy.compute_slices <= compute_slices(gpu) && engines_suffice(gpu, &occupancy.engines);
}

bool sim_mig_fits(const struct sim_mig *mig, const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t start)
{
	return fits(occupancy_of(mig, gpu), gpu, profile, start);
}

/* Placements of any profile that stay possible. */
static uint32_t open_placements(struct occupancy occupancy, const struct sim_gpu *gpu)
{
	size_t count;
	uint32_t open = 0;
	const struct sim_mig_profile *profiles = sim_mig_profiles(gpu, &count);
	for (size_t i = 0; i < count; i++)
		for (uint32_t s = 0; s < profiles[i].n_starts; s++)
			open += fits(occupancy, gpu, &profiles[i], profiles[i].starts[s]);
	return open;
}

bool sim_mig_choose_start(const struct sim_mig *mig, const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t *start)
{
	struct occupancy now = occupancy_of(mig, gpu);
	int best = -1;
	for (uint32_t i = 0; i < profile->n_starts; i++) {
		if (!fits(now, gpu, profile, profile->starts[i]))
			continue;
		struct occupancy then = now;
		occupy(&then, gpu, profile, profile->starts[i]);
		int open = (int)open_placements(then, gpu);
		if (open > best) {
			best = open;
			*start = profile->starts[i];
		}
	}
	return best >= 0;
}

uint32_t sim_mig_remaining_capacity(const struct sim_mig *mig, const struct sim_gpu *gpu, const struct sim_mig_profile *profile)
{
	struct occupancy occupancy = occupancy_of(mig, gpu);
	uint32_t capacity = 0;
	for (uint32_t i = 0; i < profile->n_starts; i++) {
		if (!fits(occupancy, gpu, profile, profile->starts[i]))
			continue;
		occupy(&occupancy, gpu, profile, profile->starts[i]);
		capacity++;
	}
	return capacity;
}

uint32_t sim_mig_create_gpu_instance(struct sim_mig *mig, const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t start)
{
	uint32_t id = gpu_instance_id(gpu, profile, start);
	struct sim_gpu_instance *gi = &mig->gpu_instances[id];
	gi->profile_id = profile->id;
	gi->placement_start = start;
	gi->placement_size = profile->memory_slices;
	gi->compute_slices = profile->compute_slices;
	gi->sm_count = sim_mig_profile_sm_count(gpu, profile);
	gi->memory_bytes = sim_mig_profile_memory_bytes(gpu, profile);
	gi->serial = mig->created++;
	atomic_store_explicit(&gi->used_bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&gi->present, 1, memory_order_release);   /* pairs with present() */
	atomic_fetch_add(&mig->changes, 1);
	return id;
}

void sim_mig_destroy_gpu_instance(struct sim_mig *mig, uint32_t id)
{
	if (atomic_exchange(&mig->gpu_instances[id].present, 0))
		atomic_fetch_add(&mig->changes, 1);
}

uint32_t sim_mig_ci_slices(const struct sim_gpu_instance *gi, uint32_t ci_profile_id)
{
	if (ci_profile_id >= sizeof ci_slices / sizeof *ci_slices || ci_slices[ci_profile_id] > gi->compute_slices)
		return 0;
	return ci_slices[ci_profile_id];
}

uint32_t sim_mig_ci_sm_count(const struct sim_gpu_instance *gi, uint32_t slices)
{
	if (slices == gi->compute_slices)
		return gi->sm_count;
	return gi->sm_count * slices / gi->compute_slices & ~1u;   /* SMs come in pairs (TPCs) */
}

static uint32_t ci_mask(const struct sim_mig *mig, uint32_t gi_id)
{
	uint32_t mask = 0;
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES; i++) {
		const struct sim_compute_instance *ci = &mig->devices[i];
		if (device_present(ci) && ci->gpu_instance_id == gi_id)
			mask |= placement_mask(ci->placement_start, ci->compute_slices);
	}
	return mask;
}

bool sim_mig_ci_fits(const struct sim_mig *mig, uint32_t gi_id, uint32_t slices, uint32_t start)
{
	const struct sim_gpu_instance *gi = &mig->gpu_instances[gi_id];
	return slices && start + slices <= gi->compute_slices && !(ci_mask(mig, gi_id) & placement_mask(start, slices));
}

uint32_t sim_mig_ci_remaining_capacity(const struct sim_mig *mig, uint32_t gi_id, uint32_t slices)
{
	uint32_t mask = ci_mask(mig, gi_id), capacity = 0;
	for (uint32_t start = 0; start + slices <= mig->gpu_instances[gi_id].compute_slices; start++) {
		if (mask & placement_mask(start, slices))
			continue;
		mask |= placement_mask(start, slices);
		capacity++;
	}
	return capacity;
}

static uint32_t free_ci_id(const struct sim_mig *mig, uint32_t gi_id)
{
	uint32_t taken = 0;
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES; i++)
		if (device_present(&mig->devices[i]) && mig->devices[i].gpu_instance_id == gi_id)
			taken |= 1u << mig->devices[i].id;
	uint32_t id = 0;
	while (taken & 1u << id)
		id++;
	return id;
}

int sim_mig_create_compute_instance(struct sim_mig *mig, const struct sim_gpu *gpu, uint32_t gi_id, uint32_t ci_profile_id, uint32_t start)
{
	int index = 0;
	while (index < SIM_MIG_MAX_DEVICES && device_present(&mig->devices[index]))
		index++;
	if (index == SIM_MIG_MAX_DEVICES)
		return -1;
	const struct sim_gpu_instance *gi = &mig->gpu_instances[gi_id];
	struct sim_compute_instance *ci = &mig->devices[index];
	char seed[SIM_UUID_LEN + 32];
	ci->serial = mig->created++;
	snprintf(seed, sizeof seed, "%s/mig/%u", gpu->uuid, ci->serial);
	sim_format_seeded_uuid("MIG-", seed, ci->uuid);
	ci->gpu_instance_id = gi_id;
	ci->id = free_ci_id(mig, gi_id);
	ci->profile_id = ci_profile_id;
	ci->placement_start = start;
	ci->compute_slices = sim_mig_ci_slices(gi, ci_profile_id);
	ci->sm_count = sim_mig_ci_sm_count(gi, ci->compute_slices);
	atomic_store_explicit(&ci->present, 1, memory_order_release);   /* pairs with device_present() */
	atomic_fetch_add(&mig->changes, 1);
	return index;
}

void sim_mig_destroy_compute_instance(struct sim_mig *mig, uint32_t device_index)
{
	if (atomic_exchange(&mig->devices[device_index].present, 0))
		atomic_fetch_add(&mig->changes, 1);
}

uint32_t sim_mig_count_compute_instances(const struct sim_mig *mig, uint32_t gi_id)
{
	uint32_t count = 0;
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES; i++)
		count += device_present(&mig->devices[i]) &&
			 (gi_id == SIM_MIG_MAX_GPU_INSTANCES || mig->devices[i].gpu_instance_id == gi_id);
	return count;
}

/* The compute instance profile that fills a GPU instance. */
static uint32_t filling_ci_profile(const struct sim_gpu_instance *gi)
{
	uint32_t id = 0;
	while (ci_slices[id] != gi->compute_slices)
		id++;
	return id;
}

static void copy_gpu_instance(const struct sim_gpu_instance *gi, struct sim_gpu_instance *out)
{
	out->profile_id = gi->profile_id;
	out->placement_start = gi->placement_start;
	out->placement_size = gi->placement_size;
	out->compute_slices = gi->compute_slices;
	out->sm_count = gi->sm_count;
	out->serial = gi->serial;
	out->memory_bytes = gi->memory_bytes;
	atomic_store_explicit(&out->used_bytes, atomic_load(&gi->used_bytes), memory_order_relaxed);
	atomic_store_explicit(&out->present, atomic_load(&gi->present), memory_order_relaxed);
}

static void copy_compute_instance(const struct sim_compute_instance *ci, struct sim_compute_instance *out)
{
	out->gpu_instance_id = ci->gpu_instance_id;
	out->id = ci->id;
	out->profile_id = ci->profile_id;
	out->placement_start = ci->placement_start;
	out->compute_slices = ci->compute_slices;
	out->sm_count = ci->sm_count;
	out->serial = ci->serial;
	memcpy(out->uuid, ci->uuid, sizeof out->uuid);
	atomic_store_explicit(&out->present, atomic_load(&ci->present), memory_order_relaxed);
}

/* Member by member: accounting goes on while the mutex is held, so the atomic members must be read as such. */
void sim_mig_snapshot(const struct sim_mig *mig, struct sim_mig *out)
{
	atomic_store_explicit(&out->enabled, atomic_load(&mig->enabled), memory_order_relaxed);
	atomic_store_explicit(&out->pending, atomic_load(&mig->pending), memory_order_relaxed);
	atomic_store_explicit(&out->changes, atomic_load(&mig->changes), memory_order_relaxed);
	out->created = mig->created;
	for (uint32_t id = 0; id < SIM_MIG_MAX_GPU_INSTANCES; id++)
		copy_gpu_instance(&mig->gpu_instances[id], &out->gpu_instances[id]);
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES; i++)
		copy_compute_instance(&mig->devices[i], &out->devices[i]);
}

bool sim_mig_boot(struct sim_mig *mig, const struct sim_gpu *gpu, uint32_t *failed)
{
	memset(mig, 0, sizeof *mig);
	atomic_store(&mig->enabled, gpu->mig_enabled);
	atomic_store(&mig->pending, gpu->mig_enabled);
	for (uint32_t i = 0; i < gpu->n_initial_mig; i++) {
		const struct sim_mig_profile *profile = sim_mig_profile_by_id(gpu, gpu->initial_mig[i].profile_id);
		uint32_t start = gpu->initial_mig[i].placement_start;
		if (!profile || !sim_mig_fits(mig, gpu, profile, start)) {
			*failed = i;
			return false;
		}
		uint32_t id = sim_mig_create_gpu_instance(mig, gpu, profile, start);
		sim_mig_create_compute_instance(mig, gpu, id, filling_ci_profile(&mig->gpu_instances[id]), 0);
	}
	return true;
}

void sim_mig_clear(struct sim_mig *mig)
{
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES; i++)
		sim_mig_destroy_compute_instance(mig, i);
	for (uint32_t id = 0; id < SIM_MIG_MAX_GPU_INSTANCES; id++)
		sim_mig_destroy_gpu_instance(mig, id);
}

void sim_mig_set_mode(struct sim_mig *mig, bool enabled)
{
	atomic_store(&mig->pending, enabled);
	if (atomic_exchange(&mig->enabled, enabled) == enabled)
		return;
	sim_mig_clear(mig);
	atomic_fetch_add(&mig->changes, 1);
}
