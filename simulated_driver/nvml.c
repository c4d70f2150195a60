/* SPDX-License-Identifier: Apache-2.0 */
/* nvml.c - life cycle of the simulated libnvidia-ml, its handles, and what is answered when something is wrong. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "simulated_driver/nvml_prototypes.h"
#include "simulated_driver/nvml_internal.h"

#define HANG_STEP_NS 20000000   /* a cleared hang ends within this time */

/* A handle is the address of one of these. They are never freed: a caller may keep a handle without end, so an address must not be reused.
 * `serial` distinguishes a re-created instance from the one before. */
struct handle {
	enum sim_handle_kind kind;
	uint32_t gpu;
	uint32_t id;
	uint32_t serial;
	struct handle *next;
};

static struct {
	pthread_mutex_t lock;               /* over init and shutdown */
	struct sim_state *state;            /* set by the first init; the mapping stays after shutdown */
	_Atomic unsigned users;             /* inits not yet shut down */
	struct sim_visibility visibility;
	uint32_t visible[SIM_MAX_GPUS];
	uint32_t n_visible;
	struct handle gpus[SIM_MAX_GPUS];
	_Atomic(struct handle *) others;    /* MIG devices and instances; grows only */
} nvml = { .lock = PTHREAD_MUTEX_INITIALIZER };

/* ---- life cycle ---- */

static bool gpu_visible(uint32_t gpu)
{
	const struct sim_mig *mig = &nvml.state->gpus[gpu].mig;
	bool visible = sim_visibility_allows(&nvml.visibility, nvml.state->topology.gpus[gpu].uuid);
	sim_lock(nvml.state);
	for (uint32_t i = 0; i < SIM_MIG_MAX_DEVICES && !visible; i++)
		visible = atomic_load(&mig->devices[i].present) && sim_visibility_allows(&nvml.visibility, mig->devices[i].uuid);
	sim_unlock(nvml.state);
	return visible;
}

static void find_visible_gpus(void)
{
	sim_visibility_from_environment(&nvml.visibility);
	nvml.n_visible = 0;
	for (uint32_t gpu = 0; gpu < nvml.state->topology.n_gpus; gpu++)
		if (gpu_visible(gpu))
			nvml.visible[nvml.n_visible++] = gpu;
}

static nvmlReturn_t driver_status(const struct sim_state *state)
{
	if (atomic_load(&state->settings.driver_absent))
		return NVML_ERROR_DRIVER_NOT_LOADED;
	return atomic_load(&state->driver_mismatch) ? NVML_ERROR_LIB_RM_VERSION_MISMATCH : NVML_SUCCESS;
}

static nvmlReturn_t map_state(void)
{
	char error[SIM_ERROR_LEN];
	if (nvml.state)
		return NVML_SUCCESS;
	nvml.state = sim_state_map(error);
	if (!nvml.state) {
		fprintf(stderr, "aliquot simulated driver: %s\n", error);   /* NVML has no words for a node that was set up wrongly */
		return NVML_ERROR_DRIVER_NOT_LOADED;
	}
	for (uint32_t gpu = 0; gpu < SIM_MAX_GPUS; gpu++)
		nvml.gpus[gpu] = (struct handle){ .kind = SIM_HANDLE_GPU, .gpu = gpu };
	return NVML_SUCCESS;
}

/* The call is delayed by the fault's present value, not by its value at the start of the call. */
static void suffer_hang(const struct sim_gpu_state *gpu)
{
	uint64_t begin = sim_now_ns();
	while ((sim_now_ns() - begin) / 1000000 < atomic_load(&gpu->hang_ms))
		nanosleep(&(struct timespec){ .tv_nsec = HANG_STEP_NS }, NULL);
}

static nvmlReturn_t first_init(unsigned int flags)
{
	nvmlReturn_t status = map_state();
	if (status == NVML_SUCCESS)
		status = driver_status(nvml.state);
	if (status != NVML_SUCCESS)
		return status;
	find_visible_gpus();
	for (uint32_t i = 0; i < nvml.n_visible && !(flags & NVML_INIT_FLAG_NO_ATTACH); i++)
		suffer_hang(&nvml.state->gpus[nvml.visible[i]]);     /* attaching reaches every GPU */
	return nvml.n_visible || (flags & NVML_INIT_FLAG_NO_GPUS) ? NVML_SUCCESS : NVML_ERROR_GPU_NOT_FOUND;
}

NVML_API nvmlReturn_t nvmlInitWithFlags(unsigned int flags)
{
	pthread_mutex_lock(&nvml.lock);
	nvmlReturn_t status = atomic_load(&nvml.users) ? NVML_SUCCESS : first_init(flags);
	if (status == NVML_SUCCESS)
		atomic_fetch_add(&nvml.users, 1);
	pthread_mutex_unlock(&nvml.lock);
	return status;
}

NVML_API nvmlReturn_t nvmlInit_v2(void)
{
	return nvmlInitWithFlags(0);
}
NVML_API nvmlReturn_t nvmlInit(void)
{
	return nvmlInitWithFlags(0);
}

NVML_API nvmlReturn_t nvmlShutdown(void)
{
	pthread_mutex_lock(&nvml.lock);
	nvmlReturn_t status = atomic_load(&nvml.users) ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
	if (status == NVML_SUCCESS)
		atomic_fetch_sub(&nvml.users, 1);
	pthread_mutex_unlock(&nvml.lock);
	return status;
}

nvmlReturn_t sim_nvml_enter(struct sim_state **state)
{
	REQUIRE(atomic_load(&nvml.users), NVML_ERROR_UNINITIALIZED);
	*state = nvml.state;
	return driver_status(nvml.state);
}

/* ---- handles ---- */

nvmlDevice_t sim_nvml_gpu_handle(uint32_t gpu)
{
	return (nvmlDevice_t)&nvml.gpus[gpu];
}

static uint32_t serial_of(const struct sim_mig *mig, enum sim_handle_kind kind, uint32_t id)
{
	return kind == SIM_HANDLE_GPU_INSTANCE ? mig->gpu_instances[id].serial : mig->devices[id].serial;
}

static bool present_in(const struct sim_mig *mig, enum sim_handle_kind kind, uint32_t id)
{
	return atomic_load(kind == SIM_HANDLE_GPU_INSTANCE ? &mig->gpu_instances[id].present : &mig->devices[id].present);
}

bool sim_nvml_still_there_locked(const struct sim_target *target, enum sim_handle_kind kind, uint32_t id)
{
	const struct sim_mig *now = &target->gpu->mig;
	return present_in(now, kind, id) && serial_of(now, kind, id) == serial_of(&target->mig, kind, id);
}

static struct handle *find_handle(enum sim_handle_kind kind, uint32_t gpu, uint32_t id, uint32_t serial)
{
	for (struct handle *h = atomic_load_explicit(&nvml.others, memory_order_acquire); h; h = h->next)
		if (h->kind == kind && h->gpu == gpu && h->id == id && h->serial == serial)
			return h;
	return NULL;
}

void *sim_nvml_handle(const struct sim_target *target, enum sim_handle_kind kind, uint32_t id)
{
	uint32_t serial = serial_of(&target->mig, kind, id);
	pthread_mutex_lock(&nvml.lock);
	struct handle *handle = find_handle(kind, target->index, id, serial);
	if (!handle && (handle = malloc(sizeof *handle))) {
		*handle = (struct handle){ kind, target->index, id, serial, atomic_load(&nvml.others) };
		/* pairs with the acquire in find_handle and known_handle */
		atomic_store_explicit(&nvml.others, handle, memory_order_release);
	}
	pthread_mutex_unlock(&nvml.lock);
	return handle;
}

/* A caller's pointer, if it is a handle at all. */
static const struct handle *known_handle(const void *pointer)
{
	for (uint32_t gpu = 0; gpu < nvml.state->topology.n_gpus; gpu++)
		if (pointer == &nvml.gpus[gpu])
			return &nvml.gpus[gpu];
	for (struct handle *h = atomic_load_explicit(&nvml.others, memory_order_acquire); h; h = h->next)
		if (pointer == h)
			return h;
	return NULL;
}

static nvmlReturn_t reach(const struct handle *handle, struct sim_target *out)
{
	struct sim_state *state = nvml.state;
	*out = (struct sim_target){ .state = state,
				    .hardware = &state->topology.gpus[handle->gpu],
				    .gpu = &state->gpus[handle->gpu],
				    .settings = &state->settings.gpus[handle->gpu],
				    .index = handle->gpu,
				    .mig_device = SIM_WHOLE_GPU };
	suffer_hang(out->gpu);
	REQUIRE(!atomic_load(&out->gpu->lost), NVML_ERROR_GPU_IS_LOST);
	if (out->hardware->mig_family != SIM_MIG_NONE) {
		sim_lock(state);
		sim_mig_snapshot(&out->gpu->mig, &out->mig);
		sim_unlock(state);
	}
	if (handle->kind != SIM_HANDLE_GPU)
		REQUIRE(present_in(&out->mig, handle->kind, handle->id) && serial_of(&out->mig, handle->kind, handle->id) == handle->serial,
			NVML_ERROR_NOT_FOUND);
	return NVML_SUCCESS;
}

nvmlReturn_t sim_nvml_target(nvmlDevice_t device, struct sim_target *out)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	if (status != NVML_SUCCESS)
		return status;
	const struct handle *handle = known_handle(device);
	REQUIRE_ARGUMENT(handle && (handle->kind == SIM_HANDLE_GPU || handle->kind == SIM_HANDLE_MIG_DEVICE));
	status = reach(handle, out);
	if (status == NVML_SUCCESS && handle->kind == SIM_HANDLE_MIG_DEVICE)
		out->mig_device = (int)handle->id;
	return status;
}

nvmlReturn_t sim_nvml_gpu(nvmlDevice_t device, struct sim_target *out)
{
	nvmlReturn_t status = sim_nvml_target(device, out);
	return status == NVML_SUCCESS && out->mig_device != SIM_WHOLE_GPU ? NVML_ERROR_NOT_SUPPORTED : status;
}

nvmlReturn_t sim_nvml_instance(const void *pointer, enum sim_handle_kind kind, struct sim_target *out, uint32_t *id)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	if (status != NVML_SUCCESS)
		return status;
	const struct handle *handle = known_handle(pointer);
	REQUIRE_ARGUMENT(handle && handle->kind == kind);
	*id = handle->id;
	return reach(handle, out);
}

uint32_t sim_nvml_visible_gpus(const uint32_t **gpus)
{
	*gpus = nvml.visible;
	return nvml.n_visible;
}

bool sim_nvml_mig_visible(const struct sim_compute_instance *device)
{
	return sim_visibility_allows(&nvml.visibility, device->uuid);
}

/* ---- small common things ---- */

/* A simulated node is administered by root and by the user who made it, so that one can be run without privileges. */
nvmlReturn_t sim_nvml_require_admin(void)
{
	struct stat node;
	uid_t user = geteuid();
	return user == 0 || (stat(sim_state_dir(), &node) == 0 && node.st_uid == user) ? NVML_SUCCESS : NVML_ERROR_NO_PERMISSION;
}

nvmlReturn_t sim_nvml_copy_text(const char *text, char *buffer, unsigned int length)
{
	REQUIRE_ARGUMENT(buffer);
	size_t size = strlen(text) + 1;
	REQUIRE(size <= length, NVML_ERROR_INSUFFICIENT_SIZE);
	memcpy(buffer, text, size);
	return NVML_SUCCESS;
}

unsigned long long sim_nvml_now_us(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

unsigned long long sim_nvml_realtime_us(uint64_t monotonic_ns)
{
	return sim_nvml_now_us() - (sim_now_ns() - monotonic_ns) / 1000;
}

/* ---- the library and the system ---- */

NVML_API nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	return status == NVML_SUCCESS ? sim_nvml_copy_text(state->topology.driver_version, version, length) : status;
}

NVML_API nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	return status == NVML_SUCCESS ? sim_nvml_copy_text(state->topology.nvml_version, version, length) : status;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion_v2(int *version)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(version);
	*version = state->topology.cuda_version;
	return NVML_SUCCESS;
}

NVML_API nvmlReturn_t nvmlSystemGetCudaDriverVersion(int *version)
{
	return nvmlSystemGetCudaDriverVersion_v2(version);
}

NVML_API nvmlReturn_t nvmlSystemGetDriverBranch(nvmlSystemDriverBranchInfo_v1_t *info, unsigned int length)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(info);
	REQUIRE(info->version == NVML_VERSION_WORD(nvmlSystemDriverBranchInfo_v1_t, 1), NVML_ERROR_ARGUMENT_VERSION_MISMATCH);
	char branch[SIM_VERSION_LEN];
	snprintf(branch, sizeof branch, "r%u_00", sim_topology_driver_major(&state->topology));
	return sim_nvml_copy_text(branch, info->branch, length < sizeof info->branch ? length : sizeof info->branch);
}

NVML_API const char *nvmlErrorString(nvmlReturn_t result)
{
	static const struct {
		nvmlReturn_t code;
		const char *text;
	} texts[] = {
		{ NVML_SUCCESS, "Success" },
		{ NVML_ERROR_UNINITIALIZED, "Uninitialized" },
		{ NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument" },
		{ NVML_ERROR_NOT_SUPPORTED, "Not Supported" },
		{ NVML_ERROR_NO_PERMISSION, "Insufficient Permissions" },
		{ NVML_ERROR_ALREADY_INITIALIZED, "Already Initialized" },
		{ NVML_ERROR_NOT_FOUND, "Not Found" },
		{ NVML_ERROR_INSUFFICIENT_SIZE, "Insufficient Size" },
		{ NVML_ERROR_INSUFFICIENT_POWER, "Insufficient External Power" },
		{ NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded" },
		{ NVML_ERROR_TIMEOUT, "Timeout" },
		{ NVML_ERROR_IRQ_ISSUE, "Interrupt Request Issue" },
		{ NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found" },
		{ NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found" },
		{ NVML_ERROR_CORRUPTED_INFOROM, "Corrupted infoROM" },
		{ NVML_ERROR_GPU_IS_LOST, "GPU is lost" },
		{ NVML_ERROR_RESET_REQUIRED, "GPU requires restart" },
		{ NVML_ERROR_OPERATING_SYSTEM, "The operating system has blocked the request." },
		{ NVML_ERROR_LIB_RM_VERSION_MISMATCH, "RM has detected an NVML/RM version mismatch." },
		{ NVML_ERROR_IN_USE, "In use by another client" },
		{ NVML_ERROR_MEMORY, "Insufficient memory" },
		{ NVML_ERROR_NO_DATA, "No data" },
		{ NVML_ERROR_VGPU_ECC_NOT_SUPPORTED, "vGPU ECC not supported" },
		{ NVML_ERROR_INSUFFICIENT_RESOURCES, "Insufficient Resources" },
		{ NVML_ERROR_FREQ_NOT_SUPPORTED, "Frequency not supported" },
		{ NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "The version word of an argument does not match" },
		{ NVML_ERROR_DEPRECATED, "Deprecated" },
		{ NVML_ERROR_NOT_READY, "Not ready" },
		{ NVML_ERROR_GPU_NOT_FOUND, "No GPU was found" },
		{ NVML_ERROR_INVALID_STATE, "Invalid state" },
		{ NVML_ERROR_RESET_TYPE_NOT_SUPPORTED, "Reset type not supported" },
	};
	for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
		if (texts[i].code == result)
			return texts[i].text;
	return "Unknown Error";
}

/* The caller sees a process of its own pid namespace by the path of its executable. */
NVML_API nvmlReturn_t nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
	struct sim_state *state;
	nvmlReturn_t status = sim_nvml_enter(&state);
	REQUIRE(status == NVML_SUCCESS, status);
	REQUIRE_ARGUMENT(name && length);
	int cursor = 0;
	struct sim_process process;
	while (sim_next_process(state, &cursor, &process)) {
		if ((unsigned int)process.pid != pid)
			continue;
		snprintf(name, length, "%s", process.name);     /* cut to fit, as the driver does */
		return NVML_SUCCESS;
	}
	return NVML_ERROR_NOT_FOUND;
}
