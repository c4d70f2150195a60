/* SPDX-License-Identifier: Apache-2.0 */
/* nvml_internal.h - what the files of the simulated libnvidia-ml share: from a caller's handle to the place on the node it means.
 *
 * Every entry point with a handle begins with sim_nvml_target() or sim_nvml_gpu(): they reply to "not initialised", a version mismatch, a
 * hang, a lost GPU and a stale MIG handle, so no entry point can forget one of them. nvml.c is the only file that keeps state of the
 * process. */
#ifndef ALIQUOT_SIM_NVML_INTERNAL_H
#define ALIQUOT_SIM_NVML_INTERNAL_H

#include "nvml_abi.h"
#include "simulated_driver/state.h"

#define NVML_API __attribute__((visibility("default")))

enum sim_handle_kind { SIM_HANDLE_GPU, SIM_HANDLE_MIG_DEVICE, SIM_HANDLE_GPU_INSTANCE, SIM_HANDLE_COMPUTE_INSTANCE };

/* What a device handle means. */
struct sim_target {
	struct sim_state *state;
	const struct sim_gpu *hardware;
	struct sim_gpu_state *gpu;
	struct sim_gpu_settings *settings;
	uint32_t index;             /* of the GPU, in topology and state */
	int mig_device;             /* index in mig.devices, or SIM_WHOLE_GPU */
	struct sim_mig mig;         /* as it was when this was filled: other processes may create and destroy instances meanwhile */
};

/* Initialised, driver loaded, versions agree? Answers the state. */
nvmlReturn_t sim_nvml_enter(struct sim_state **state);

/* A GPU or a MIG device that is there and answers. */
nvmlReturn_t sim_nvml_target(nvmlDevice_t device, struct sim_target *out);
/* The same, but NOT_SUPPORTED for a MIG device. */
nvmlReturn_t sim_nvml_gpu(nvmlDevice_t device, struct sim_target *out);

/* A GPU instance or compute instance that still exists; `id` is its index in mig. */
nvmlReturn_t sim_nvml_instance(const void *handle, enum sim_handle_kind kind, struct sim_target *out, uint32_t *id);

/* Whether that instance is still the one in the snapshot. The caller holds the mutex, and is about to change it. */
bool sim_nvml_still_there_locked(const struct sim_target *target, enum sim_handle_kind kind, uint32_t id);

/* Handles of what is in the snapshot. The same thing always has the same handle. NULL when memory is out. */
void *sim_nvml_handle(const struct sim_target *target, enum sim_handle_kind kind, uint32_t id);
nvmlDevice_t sim_nvml_gpu_handle(uint32_t gpu);

/* The GPUs this process may see, in order of their minor numbers. */
uint32_t sim_nvml_visible_gpus(const uint32_t **gpus);
bool sim_nvml_mig_visible(const struct sim_compute_instance *device);

/* Setting anything takes an administrator, as with the real driver. */
nvmlReturn_t sim_nvml_require_admin(void);

/* Copy text into a caller's buffer, or INSUFFICIENT_SIZE. */
nvmlReturn_t sim_nvml_copy_text(const char *text, char *buffer, unsigned int length);

/* Time as NVML's timestamps have it: microseconds of CLOCK_REALTIME. */
unsigned long long sim_nvml_now_us(void);

/* The whole 100 ms buckets of utilisation: `end_ns` (CLOCK_MONOTONIC) is where the last finished one ends. */
uint64_t sim_nvml_last_bucket_end_ns(void);
unsigned long long sim_nvml_realtime_us(uint64_t monotonic_ns);

/* Share of the SM time that was used in the `window_ns` before `end_ns`, in percent. */
unsigned sim_nvml_utilization_percent(const struct sim_target *target, int mig_device, uint64_t end_ns, uint64_t window_ns);
unsigned sim_nvml_gpu_percent(const struct sim_target *target);     /* of the whole GPU, over the driver's usual window */
unsigned sim_nvml_memory_percent(unsigned gpu_percent);

unsigned sim_nvml_power_mw(const struct sim_target *target);
unsigned sim_nvml_power_limit_mw(const struct sim_target *target);
unsigned long long sim_nvml_energy_mj(const struct sim_target *target);
unsigned sim_nvml_temperature_c(const struct sim_target *target);
unsigned sim_nvml_clock_mhz(const struct sim_target *target, nvmlClockType_t type, bool maximum);

/* Begin a function: resolve the handle into `t`, check a pointer, or return. */
#define TARGET(resolve, device)                             \
	struct sim_target t;                                \
	do {                                                \
		nvmlReturn_t status_ = resolve(device, &t); \
		if (status_ != NVML_SUCCESS)                \
			return status_;                     \
	} while (0)
#define REQUIRE(condition, error)       \
	do {                            \
		if (!(condition))       \
			return (error); \
	} while (0)
#define REQUIRE_ARGUMENT(condition) REQUIRE(condition, NVML_ERROR_INVALID_ARGUMENT)

#endif
