/* SPDX-License-Identifier: Apache-2.0 */
/* mig.h - Multi-Instance GPU: the profiles of the real families, the rules of placement, and the instances that exist.
 *
 * `struct sim_mig` is embedded once per GPU in the mapped state. Its structure (which instances exist) changes only under the state's
 * mutex. A reader of more than one word of an instance that it does not keep in use takes a snapshot under the mutex. `present`, `enabled`,
 * `pending` and `changes` may be read alone at any time; `used_bytes` is plain atomic accounting. A MIG *device* (what CUDA and NVML
 * enumerate, with a "MIG-" UUID) is one compute instance; its memory is that of the GPU instance around it, shared with its sibling compute
 * instances. Profile IDs and placements are NVIDIA's (A100, A30, H100, H200, B200); the differences between models of one family, memory
 * and SMs of an instance, come from the topology. The functions here use no lock, no process and no NVML. */
#ifndef ALIQUOT_SIM_MIG_H
#define ALIQUOT_SIM_MIG_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "simulated_driver/topology.h"

/* GPU instance ids are 0..14: they number the tree of placements (whole, halves, quarters, eighths) */
#define SIM_MIG_MAX_GPU_INSTANCES   15
#define SIM_MIG_MAX_DEVICES         7   /* compute instances on one GPU; the index here is the index NVML and CUDA enumerate by */
#define SIM_MIG_MAX_STARTS          7

enum sim_mig_family { SIM_MIG_NONE = 0, SIM_MIG_7_SLICES, SIM_MIG_4_SLICES };

struct sim_mig_profile {
	uint32_t nvml_index;                /* NVML_GPU_INSTANCE_PROFILE_* */
	uint32_t id;                        /* the driver's profile ID */
	uint32_t compute_slices;
	uint32_t memory_slices;
	uint32_t max_count;
	uint32_t shape;                     /* index into sim_gpu.mig_sm_counts */
	uint32_t n_starts;
	uint8_t starts[SIM_MIG_MAX_STARTS];
	bool media_extension;           /* "+me" */
};

struct sim_mig_engines {
	uint32_t copy, decoder, encoder, jpeg, ofa;
};

struct sim_gpu_instance {
	_Atomic uint32_t present;
	uint32_t profile_id;
	uint32_t placement_start;           /* memory slices */
	uint32_t placement_size;
	uint32_t compute_slices;
	uint32_t sm_count;
	uint32_t serial; /* differs for every creation, so that a handle of a destroyed instance is known to be stale */
	uint32_t unused;
	uint64_t memory_bytes; /* usable */
	_Atomic uint64_t used_bytes; /* device memory held by processes on its compute instances */
};

struct sim_compute_instance {
	_Atomic uint32_t present;
	uint32_t gpu_instance_id; /* index into gpu_instances[] */
	uint32_t id; /* compute instance id, unique inside its GPU instance */
	uint32_t profile_id; /* compute instance profile ID of the driver */
	uint32_t placement_start; /* compute slices inside the GPU instance */
	uint32_t compute_slices;
	uint32_t sm_count;
	uint32_t serial;
	char uuid[SIM_UUID_LEN]; /* new for every creation */
};

struct sim_mig {
	_Atomic uint32_t enabled; /* mode in force */
	_Atomic uint32_t pending; /* requested mode; differs from `enabled` while a GPU waits to be idle */
	uint32_t created; /* creations so far; feeds UUIDs and serials */
	_Atomic uint32_t changes; /* of mode and instances so far: what an event set compares */
	struct sim_gpu_instance gpu_instances[SIM_MIG_MAX_GPU_INSTANCES];
	struct sim_compute_instance devices[SIM_MIG_MAX_DEVICES];
};

/* The profiles of a GPU, largest first; count 0 when it has no MIG. */
const struct sim_mig_profile *sim_mig_profiles(const struct sim_gpu *gpu, size_t *count);
const struct sim_mig_profile *sim_mig_profile_by_id(const struct sim_gpu *gpu, uint32_t id);
const struct sim_mig_profile *sim_mig_profile_by_nvml_index(const struct sim_gpu *gpu, uint32_t nvml_index);
const struct sim_mig_profile *sim_mig_profile_by_name(const struct sim_gpu *gpu, const char *name);

/* "3g.40gb" or "1g.10gb+me"; with compute_slices below the profile's own, a compute instance's name: "1c.3g.40gb". */
void sim_mig_profile_name(const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t compute_slices, char *buffer,
			  size_t size);

uint64_t sim_mig_profile_memory_bytes(const struct sim_gpu *gpu, const struct sim_mig_profile *profile);
uint32_t sim_mig_profile_sm_count(const struct sim_gpu *gpu, const struct sim_mig_profile *profile);
struct sim_mig_engines sim_mig_profile_engines(const struct sim_gpu *gpu, const struct sim_mig_profile *profile);

/* Whether a GPU instance of this profile can be created at `start` now. */
bool sim_mig_fits(const struct sim_mig *mig, const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t start);

/* The start the driver would choose: the one that leaves most room for later instances. False when no start fits. */
bool sim_mig_choose_start(const struct sim_mig *mig, const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t *start);

/* How many more GPU instances of this profile could be created now. */
uint32_t sim_mig_remaining_capacity(const struct sim_mig *mig, const struct sim_gpu *gpu, const struct sim_mig_profile *profile);

/* Create a GPU instance where sim_mig_fits() returned true; returns its id. */
uint32_t sim_mig_create_gpu_instance(struct sim_mig *mig, const struct sim_gpu *gpu, const struct sim_mig_profile *profile, uint32_t start);
void sim_mig_destroy_gpu_instance(struct sim_mig *mig, uint32_t gpu_instance_id);

/* Compute slices a compute instance may have inside a GPU instance: CI profile ids 0, 1, 2, 3, 4 mean 1, 2, 3, 4, 7 slices; 0 for no such
 * profile. */
uint32_t sim_mig_ci_slices(const struct sim_gpu_instance *gi, uint32_t ci_profile_id);
uint32_t sim_mig_ci_sm_count(const struct sim_gpu_instance *gi, uint32_t compute_slices);
bool sim_mig_ci_fits(const struct sim_mig *mig, uint32_t gpu_instance_id, uint32_t compute_slices, uint32_t start);
uint32_t sim_mig_ci_remaining_capacity(const struct sim_mig *mig, uint32_t gpu_instance_id, uint32_t compute_slices);

/* Create a compute instance where sim_mig_ci_fits() returned true; returns its MIG device index, or -1 when the GPU has no index left. */
int sim_mig_create_compute_instance(struct sim_mig *mig, const struct sim_gpu *gpu, uint32_t gpu_instance_id, uint32_t ci_profile_id,
				    uint32_t start);
void sim_mig_destroy_compute_instance(struct sim_mig *mig, uint32_t device_index);

/* Number of compute instances of one GPU instance, or of the whole GPU with SIM_MIG_MAX_GPU_INSTANCES. */
uint32_t sim_mig_count_compute_instances(const struct sim_mig *mig, uint32_t gpu_instance_id);

/* A copy that hangs together; the caller holds the state's mutex. */
void sim_mig_snapshot(const struct sim_mig *mig, struct sim_mig *out);

/* Bring `mig` to its state at boot by the topology. False when an initial instance does not fit; `failed` then holds its index. */
bool sim_mig_boot(struct sim_mig *mig, const struct sim_gpu *gpu, uint32_t *failed);

/* Put a mode in force. Instances survive neither a change nor a GPU reset (sim_mig_clear). */
void sim_mig_set_mode(struct sim_mig *mig, bool enabled);
void sim_mig_clear(struct sim_mig *mig);

#endif
