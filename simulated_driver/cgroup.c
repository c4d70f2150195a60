/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cgroup.c - which processes a memory limit of NVML (R615 and newer) covers, and what they hold.
 *
 * A cgroup is a directory in which a process list can be read. The real driver finds a process's cgroup in the kernel. This one reads the
 * list as the caller sees it: a process that cannot see the directory, as in most containers, is not limited.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "simulated_driver/state.h"

FILE *sim_cgroup_open(const char *name)
{
	char path[SIM_NAMESPACE_LEN + 16];
	snprintf(path, sizeof path, "%s/cgroup.procs", name);
	return fopen(path, "re");
}

static uint64_t held_by_pid(struct sim_state *state, uint32_t gpu, long pid)
{
	int cursor = 0;
	struct sim_process process;
	while (sim_next_process(state, &cursor, &process))
		if (process.pid == pid)
			return sim_slot_used_bytes(state, process.slot, gpu);
	return 0;
}

uint64_t sim_cgroup_used_bytes(struct sim_state *state, uint32_t gpu, FILE *procs, bool *has_caller)
{
	uint64_t bytes = 0;
	char line[32];
	*has_caller = false;
	while (fgets(line, sizeof line, procs)) {
		long pid = strtol(line, NULL, 10);
		bytes += held_by_pid(state, gpu, pid);
		*has_caller |= pid == (long)getpid();
	}
	return bytes;
}

static bool is_within(struct sim_state *state, uint32_t gpu, const struct sim_memory_limit *limit)
{
	FILE *procs = sim_cgroup_open(limit->name);
	if (!procs)
		return true;
	bool has_caller;
	uint64_t bytes = sim_cgroup_used_bytes(state, gpu, procs, &has_caller);
	fclose(procs);
	return !has_caller || bytes <= limit->hard_bytes;
}

bool sim_cgroups_allow(struct sim_state *state, uint32_t gpu)
{
	struct sim_gpu_settings *settings = &state->settings.gpus[gpu];
	if (!atomic_load_explicit(&settings->has_memory_limits, memory_order_acquire))
		return true;
	for (uint32_t i = 0; i < SIM_MAX_MEMORY_LIMITS; i++) {
		sim_lock(state);
		struct sim_memory_limit limit = settings->memory_limits[i];
		sim_unlock(state);
		if (limit.name[0] && !is_within(state, gpu, &limit))
			return false;
	}
	return true;
}
