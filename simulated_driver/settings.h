/* SPDX-License-Identifier: Apache-2.0 */
/* settings.h - an administrator's settings on a simulated node, and the bell that wakes waiters for events.
 *
 * Part of the mapped state. A node of zeros is a node with default settings, so state.c has nothing to initialise here. Text and counters
 * change under sim_lock; single words are atomic. libnvidia-ml and aliquot-sim write. `compute_mode` and `driver_absent` concern CUDA
 * programs, too. */
#ifndef ALIQUOT_SIM_SETTINGS_H
#define ALIQUOT_SIM_SETTINGS_H

#include <stdatomic.h>
#include <stdint.h>

#include "simulated_driver/topology.h"

#define SIM_MAX_MEMORY_LIMITS   64      /* namespaces with a limit, per GPU */
#define SIM_NAMESPACE_LEN       256

/* Device memory that the processes of one namespace may hold (nvmlDeviceSetMemoryLimits_v1). */
struct sim_memory_limit {
	char name[SIM_NAMESPACE_LEN];   /* empty: entry free */
	uint64_t soft_bytes, hard_bytes;
};

struct sim_gpu_settings {
	_Atomic uint32_t compute_mode;      /* nvmlComputeMode_t */
	_Atomic uint32_t persistence_off;
	_Atomic uint32_t power_limit_mw;    /* 0: the topology's default */
	_Atomic uint32_t has_memory_limits; /* not 0: a limit was set since the node was made */
	uint64_t energy_busy_ns;            /* busy time counted into the energy total until energy_counted_ns (CLOCK_MONOTONIC) */
	uint64_t energy_counted_ns;
	struct sim_memory_limit memory_limits[SIM_MAX_MEMORY_LIMITS];
};

struct sim_settings {
	_Atomic uint32_t driver_absent;     /* no kernel module is loaded: nothing initialises */
	_Atomic uint32_t living_samples;    /* samples of utilisation name no process that has ended */
	_Atomic uint32_t bell;              /* futex word; rung (sim_ring_bell) after anything that can be an event */
	struct sim_gpu_settings gpus[SIM_MAX_GPUS];
};

#endif
