/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_init.c - coming to life: the node's state, the devices this process may use, its slot, fork, and the objects behind handles. */
#define _GNU_SOURCE
#include <ctype.h>
#include <dlfcn.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

struct sim_cuda sim_cuda = { .slot = -1 };
__thread struct sim_thread sim_thread __attribute__((tls_model("initial-exec")));

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t slot_lock = PTHREAD_MUTEX_INITIALIZER;   /* inside memory locks, unlike init_lock */

/* ---- objects --------------------------------------------------------------------------------------------------------- */

static struct {
	pthread_mutex_t lock;
	struct sim_object *free[SIM_KIND_COUNT], *made;
} objects = { .lock = PTHREAD_MUTEX_INITIALIZER };

void *sim_object_new(enum sim_kind kind, size_t size)
{
	pthread_mutex_lock(&objects.lock);
	struct sim_object *object = objects.free[kind];
	if (object) {
		objects.free[kind] = object->next_free;
	} else if ((object = malloc(size))) {
		object->next_made = objects.made;
		objects.made = object;
	}
	pthread_mutex_unlock(&objects.lock);
	if (!object)
		return NULL;
	memset((char *)object + sizeof *object, 0, size - sizeof *object);
	__atomic_store_n(&object->magic, SIM_MAGIC | (uint32_t)kind, __ATOMIC_RELEASE);
	return object;
}

void sim_object_delete(void *pointer)
{
	struct sim_object *object = pointer;
	uint32_t kind = object->magic & 0xff;
	pthread_mutex_lock(&objects.lock);
	__atomic_store_n(&object->magic, 0, __ATOMIC_RELAXED);      /* a thread may be looking at the stale handle */
	object->next_free = objects.free[kind];
	objects.free[kind] = object;
	pthread_mutex_unlock(&objects.lock);
}

/* ---- the process's slot ---------------------------------------------------------------------------------------------- */

/* A daemon shows itself by the socket in CUDA_MPS_PIPE_DIRECTORY. The code only checks that it exists: nothing works differently for its
 * clients. */
static bool finds_mps_daemon(void)
{
	const char *directory = getenv("CUDA_MPS_PIPE_DIRECTORY");
	char path[PATH_MAX];
	struct stat about;
	int length = directory ? snprintf(path, sizeof path, "%s/control", directory) : -1;
	return length >= 0 && (size_t)length < sizeof path && stat(path, &about) == 0 && S_ISSOCK(about.st_mode);
}

/* Taken when something is first to be held, not at cuInit: a process that only counts devices is no client of the GPU. */
bool sim_claim_slot(void)
{
	if (sim_likely(atomic_load_explicit(&sim_cuda.slot, memory_order_acquire) >= 0))
		return true;
	pthread_mutex_lock(&slot_lock);
	int slot = atomic_load(&sim_cuda.slot);
	if (slot < 0) {
		slot = sim_slot_claim(sim_cuda.state);
		if (slot >= 0)
			atomic_store(&sim_cuda.state->slots[slot].mps_client, finds_mps_daemon());
		for (int i = 0; slot >= 0 && i < sim_cuda.n_devices; i++) {
			const struct sim_domain *domain = &sim_cuda.devices[i].domain;
			struct sim_slot_gpu *held = &sim_cuda.state->slots[slot].gpus[domain->gpu];
			atomic_store(&held->gpu_instance, domain->gpu_instance);
			atomic_store(&held->mig_device, domain->mig_device);
		}
		atomic_store_explicit(&sim_cuda.slot, slot, memory_order_release);
	}
	pthread_mutex_unlock(&slot_lock);
	return slot >= 0;
}

/* ---- which devices --------------------------------------------------------------------------------------------------- */

struct candidate {
	uint32_t gpu;
	int mig_device;
	const char *uuid;
};

/* "GPU-01234567-89ab-..." or "MIG-..." to 16 bytes. */
static CUuuid parse_uuid(const char *text)
{
	CUuuid uuid = { { 0 } };
	const char *at = strchr(text, '-');
	for (int nibble = 0; at && *at && nibble < 32; at++) {
		if (!isxdigit((unsigned char)*at))
			continue;
		int value = isdigit((unsigned char)*at) ? *at - '0' : tolower((unsigned char)*at) - 'a' + 10;
		uuid.bytes[nibble / 2] = (char)(uuid.bytes[nibble / 2] << 4 | value);
		nibble++;
	}
	return uuid;
}

/* A GPU in MIG mode cannot be used as a whole; its instances can, and CUDA gives a process one of them. */
static size_t list_candidates(struct sim_state *state, const struct sim_visibility *visible, struct candidate *gpus, struct candidate *migs,
			      size_t *n_migs)
{
	size_t n_gpus = 0;
	*n_migs = 0;
	for (uint32_t i = 0; i < state->topology.n_gpus; i++) {
		struct sim_mig *mig = &state->gpus[i].mig;
		if (!atomic_load(&mig->enabled)) {
			if (sim_visibility_allows(visible, state->topology.gpus[i].uuid))
				gpus[n_gpus++] = (struct candidate){ i, SIM_WHOLE_GPU, state->topology.gpus[i].uuid };
			continue;
		}
		for (int device = 0; device < SIM_MIG_MAX_DEVICES; device++)
			if (atomic_load_explicit(&mig->devices[device].present, memory_order_acquire) &&
			    sim_visibility_allows(visible, mig->devices[device].uuid))
				migs[(*n_migs)++] = (struct candidate){ i, device, mig->devices[device].uuid };
	}
	return n_gpus;
}

static const struct candidate *match_uuid(const struct candidate *list, size_t count, const char *prefix)
{
	const struct candidate *found = NULL;
	for (size_t i = 0; i < count; i++)
		if (strncasecmp(list[i].uuid, prefix, strlen(prefix)) == 0) {
			if (found)
				return NULL;    /* ambiguous */
			found = &list[i];
		}
	return found;
}

/* One entry of CUDA_VISIBLE_DEVICES: an index among the whole GPUs, or the beginning of a UUID. */
static const struct candidate *match_token(const char *token, const struct candidate *gpus, size_t n_gpus, const struct candidate *migs,
					   size_t n_migs)
{
	char *end;
	if (strncasecmp(token, "GPU-", 4) == 0)
		return match_uuid(gpus, n_gpus, token);
	if (strncasecmp(token, "MIG-", 4) == 0)
		return match_uuid(migs, n_migs, token);
	unsigned long index = strtoul(token, &end, 10);
	if (end == token || *end != '\0')
		return NULL;
	if (n_gpus == 0)
		return index == 0 && n_migs ? &migs[0] : NULL;
	return index < n_gpus ? &gpus[index] : NULL;
}

/* The list ends at the first entry that matches no device, as in the real driver; an entry given twice hides everything. */
static size_t choose_by_environment(const char *wish, const struct candidate *gpus, size_t n_gpus, const struct candidate *migs,
				    size_t n_migs, struct candidate *chosen)
{
	char text[4096], *rest = NULL;
	size_t count = 0;
	snprintf(text, sizeof text, "%s", wish);
	for (char *token = strtok_r(text, ", \t", &rest); token && count < SIM_MAX_GPUS; token = strtok_r(NULL, ", \t", &rest)) {
		const struct candidate *found = match_token(token, gpus, n_gpus, migs, n_migs);
		if (!found || (found->mig_device != SIM_WHOLE_GPU && count))
			break;
		for (size_t i = 0; i < count; i++)
			if (chosen[i].uuid == found->uuid)
				return 0;
		chosen[count++] = *found;
		if (found->mig_device != SIM_WHOLE_GPU)
			break;
	}
	return count;
}

static size_t choose_devices(struct sim_state *state, struct candidate *chosen)
{
	static struct sim_visibility visible;   /* large, and only used under init_lock */
	struct candidate migs[SIM_MAX_GPUS * SIM_MIG_MAX_DEVICES];
	struct candidate gpus[SIM_MAX_GPUS];
	size_t n_migs, n_gpus;
	sim_visibility_from_environment(&visible);
	n_gpus = list_candidates(state, &visible, gpus, migs, &n_migs);
	const char *wish = getenv("CUDA_VISIBLE_DEVICES");
	if (wish)
		return choose_by_environment(wish, gpus, n_gpus, migs, n_migs, chosen);
	if (n_gpus == 0 && n_migs) {
		chosen[0] = migs[0];
		return 1;
	}
	memcpy(chosen, gpus, n_gpus * sizeof *gpus);
	return n_gpus;
}

static void mig_name(struct sim_state *state, const struct candidate *from, char *name)
{
	const struct sim_gpu *gpu = &state->topology.gpus[from->gpu];
	const struct sim_compute_instance *device = &state->gpus[from->gpu].mig.devices[from->mig_device];
	const struct sim_gpu_instance *instance = &state->gpus[from->gpu].mig.gpu_instances[device->gpu_instance_id];
	const struct sim_mig_profile *profile = sim_mig_profile_by_id(gpu, instance->profile_id);
	char text[SIM_NAME_LEN] = "";
	if (profile)
		sim_mig_profile_name(gpu, profile, device->compute_slices, text, sizeof text);
	if (snprintf(name, SIM_NAME_LEN, "%s MIG %s", gpu->name, text) >= SIM_NAME_LEN)
		name[SIM_NAME_LEN - 1] = '\0';
}

/* What one SM holds at a time, by compute capability. */
static void fill_residency(struct sim_device *device)
{
	uint32_t capability = device->hardware->compute_major * 10 + device->hardware->compute_minor;
	device->threads_per_sm = capability == 75 ? 1024 : capability == 86 || capability == 89 || capability >= 120 ? 1536 : 2048;
	device->blocks_per_sm = capability == 75 || capability == 86 ? 16 : capability == 89 ? 24 : 32;
}

static bool fill_device(struct sim_state *state, struct sim_device *device, int ordinal, const struct candidate *from)
{
	device->ordinal = ordinal;
	device->gpu = from->gpu;
	device->hardware = &state->topology.gpus[from->gpu];
	device->shared = &state->gpus[from->gpu];
	device->gpu_uuid = parse_uuid(device->hardware->uuid);
	device->uuid = parse_uuid(from->uuid);
	device->is_mig = from->mig_device != SIM_WHOLE_GPU;
	device->sm_count = device->hardware->sm_count;
	fill_residency(device);
	if (!device->is_mig) {
		memcpy(device->name, device->hardware->name, sizeof device->name);
		return sim_domain_of_gpu(state, from->gpu, &device->domain);
	}
	device->sm_count = device->shared->mig.devices[from->mig_device].sm_count;
	mig_name(state, from, device->name);
	return sim_domain_of_mig(state, from->gpu, (uint32_t)from->mig_device, &device->domain);
}

/* ---- cuInit ---------------------------------------------------------------------------------------------------------- */

/* A forked child has no lock on its slot, no engine threads, and locks in unknown states: like the real driver, it gets nothing. */
static void after_fork_in_child(void)
{
	if (atomic_exchange(&sim_cuda.ready, 0))
		atomic_store(&sim_cuda.forked, 1);
}

static CUresult open_devices(struct sim_state *state)
{
	struct candidate chosen[SIM_MAX_GPUS];
	size_t count = choose_devices(state, chosen);
	if (count == 0)
		return CUDA_ERROR_NO_DEVICE;
	for (size_t i = 0; i < count; i++)
		if (!fill_device(state, &sim_cuda.devices[i], (int)i, &chosen[i]))
			return CUDA_ERROR_NO_DEVICE;
	sim_cuda.n_devices = (int)count;
	if (!sim_memory_init(sim_cuda.devices, (int)count))
		return CUDA_ERROR_OUT_OF_MEMORY;
	for (size_t i = 0; i < count; i++)
		if (!sim_engine_init(&sim_cuda.devices[i].engine, &sim_cuda.devices[i]) || !sim_pool_init_default(&sim_cuda.devices[i]))
			return CUDA_ERROR_OUT_OF_MEMORY;
	return CUDA_SUCCESS;
}

static CUresult initialise(void)
{
	char error[SIM_ERROR_LEN];
	if (!sim_cuda.state)
		sim_cuda.state = sim_state_map(error);
	if (!sim_cuda.state) {
		fprintf(stderr, "aliquot simulated driver: %s\n", error);
		return CUDA_ERROR_NO_DEVICE;
	}
	if (atomic_load(&sim_cuda.state->settings.driver_absent))
		return CUDA_ERROR_NO_DEVICE;
	if (atomic_load(&sim_cuda.state->driver_mismatch))
		return CUDA_ERROR_SYSTEM_DRIVER_MISMATCH;
	CUresult result = sim_cuda.n_devices ? CUDA_SUCCESS : open_devices(sim_cuda.state);
	if (result == CUDA_SUCCESS) {
		pthread_atfork(NULL, NULL, after_fork_in_child);
		atomic_store_explicit(&sim_cuda.ready, 1, memory_order_release);
	}
	return result;
}

/* A tool that the environment names is loaded before cuInit returns, as the real driver does it; the tool calls the driver in its turn. */
static void inject(void)
{
	const char *path = getenv("CUDA_INJECTION64_PATH");
	void *tool = path && *path ? dlopen(path, RTLD_NOW) : NULL;
	int (*initialise_tool)(void) = tool ? (int (*)(void))dlsym(tool, "InitializeInjection") : NULL;
	if (initialise_tool)
		initialise_tool();
}

CUresult cuInit(unsigned int flags)
{
	if (sim_ready())
		return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS;
	SIM_REQUIRE(flags == 0);
	if (atomic_load(&sim_cuda.forked))
		return CUDA_ERROR_NOT_INITIALIZED;
	pthread_mutex_lock(&init_lock);
	bool first = !atomic_load(&sim_cuda.ready);
	CUresult result = first ? initialise() : CUDA_SUCCESS;
	pthread_mutex_unlock(&init_lock);
	if (first && result == CUDA_SUCCESS)
		inject();
	return result;
}

/* Needs no cuInit; without a node it returns the version that this library was made for. */
CUresult cuDriverGetVersion(int *version)
{
	static _Atomic int of_node;     /* read without the lock, in which another thread may be while this one forks */
	char error[SIM_ERROR_LEN];
	SIM_REQUIRE(version);
	if (!atomic_load(&of_node)) {
		pthread_mutex_lock(&init_lock);
		if (!sim_cuda.state)
			sim_cuda.state = sim_state_map(error);
		if (sim_cuda.state)
			atomic_store(&of_node, (int)sim_cuda.state->topology.cuda_version);
		pthread_mutex_unlock(&init_lock);
	}
	*version = atomic_load(&of_node) ? atomic_load(&of_node) : 13000;
	return CUDA_SUCCESS;
}

CUresult cuProfilerInitialize(const char *config, const char *output, int mode)
{
	(void)config, (void)output, (void)mode;
	return CUDA_ERROR_NOT_SUPPORTED;    /* as drivers since CUDA 11 answer */
}

CUresult cuProfilerStart(void)
{
	CUcontext context;
	return sim_current(&context);
}

CUresult cuProfilerStop(void)
{
	CUcontext context;
	return sim_current(&context);
}
