/* SPDX-License-Identifier: Apache-2.0 */
/* state.c - mapping the node's state, its mutex, faults, and what the environment lets a process see. Slots and accounting: process.c. */
#define _GNU_SOURCE
#include "simulated_driver/state.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "simulated_driver/state_internal.h"

static struct {
	struct sim_state *state;
	int fd;
	char dir[PATH_MAX];
} mapped = { .fd = -1 };

int sim_state_fd(void)
{
	return mapped.fd;
}
const char *sim_state_dir(void)
{
	return mapped.dir;
}

uint64_t sim_now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static uint64_t wall_clock_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

/* ---- creating -------------------------------------------------------------------------------------------------------- */

__attribute__((format(printf, 2, 3))) static bool fail(char error[SIM_ERROR_LEN], const char *format, ...)
{
	va_list args;
	va_start(args, format);
	vsnprintf(error, SIM_ERROR_LEN, format, args);
	va_end(args);
	return false;
}

static void mutex_init(pthread_mutex_t *mutex)
{
	pthread_mutexattr_t attr;
	pthread_mutexattr_init(&attr);
	pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
	pthread_mutex_init(mutex, &attr);
	pthread_mutexattr_destroy(&attr);
}

static bool fill(struct sim_state *state, const struct sim_topology *topology, char error[SIM_ERROR_LEN])
{
	state->abi = SIM_STATE_ABI;
	state->size = sizeof *state;
	state->topology = *topology;
	state->boot_time_ns = wall_clock_ns();
	mutex_init(&state->mutex);
	for (uint32_t i = 0; i < topology->n_gpus; i++) {
		struct sim_gpu_state *gpu = &state->gpus[i];
		uint32_t failed = 0;
		atomic_store(&gpu->ecc_mode_pending, topology->gpus[i].ecc_enabled);
		if (!sim_mig_boot(&gpu->mig, &topology->gpus[i], &failed))
			return fail(error, "topology: GPU %u: initial MIG instance %u does not fit beside those before it", i, failed);
	}
	state->magic = SIM_STATE_MAGIC;
	return true;
}

/* Write a complete state file under a private name, which the caller then links or renames into place. */
static bool write_temporary(const char *path, const struct sim_topology *topology, char error[SIM_ERROR_LEN])
{
	int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
	if (fd < 0)
		return fail(error, "%s: cannot create: %s", path, strerror(errno));
	bool ok = false;
	struct sim_state *state = MAP_FAILED;
	/* Users in containers have other uids than the user of `aliquot-sim init`; the node belongs to all of them. */
	if (fchmod(fd, 0666) != 0 || ftruncate(fd, sizeof *state) != 0)
		fail(error, "%s: cannot size to %zu bytes: %s", path, sizeof *state, strerror(errno));
	else if ((state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)) == MAP_FAILED)
		fail(error, "%s: cannot map: %s", path, strerror(errno));
	else
		ok = fill(state, topology, error);
	if (state != MAP_FAILED)
		munmap(state, sizeof *state);
	close(fd);
	if (!ok)
		unlink(path);
	return ok;
}

static bool temporary_path(const char *dir, char path[PATH_MAX], char error[SIM_ERROR_LEN])
{
	if (snprintf(path, PATH_MAX, "%s/.state.%ld.%llu", dir, (long)getpid(), (unsigned long long)sim_now_ns()) >= PATH_MAX)
		return fail(error, "%s: the directory's path is too long", dir);
	return true;
}

static bool state_path(const char *dir, char path[PATH_MAX], char error[SIM_ERROR_LEN])
{
	if (snprintf(path, PATH_MAX, "%s/state", dir) >= PATH_MAX)
		return fail(error, "%s: the directory's path is too long", dir);
	return true;
}

bool sim_state_create(const char *dir, const struct sim_topology *topology, char error[SIM_ERROR_LEN])
{
	char temporary[PATH_MAX], path[PATH_MAX];
	if (!temporary_path(dir, temporary, error) || !state_path(dir, path, error) || !write_temporary(temporary, topology, error))
		return false;
	if (rename(temporary, path) != 0) {
		fail(error, "%s: cannot put in place: %s", path, strerror(errno));
		unlink(temporary);
		return false;
	}
	return true;
}

/* Make `state` from `topology`, unless another process was faster: link() refuses when the name exists, so all agree on one file. */
static bool create_from_topology(const char *dir, const char *path, char error[SIM_ERROR_LEN])
{
	char temporary[PATH_MAX], source[PATH_MAX];
	struct sim_topology_error wrong;
	struct sim_topology *topology = malloc(sizeof *topology);
	bool ok = false;

	if (!topology)
		return fail(error, "no memory for a topology");
	if (snprintf(source, sizeof source, "%s/topology", dir) >= (int)sizeof source)
		fail(error, "%s: the directory's path is too long", dir);
	else if (!sim_topology_load(source, NULL, topology, &wrong))
		fail(error, "%s", wrong.message);
	else if (temporary_path(dir, temporary, error) && write_temporary(temporary, topology, error)) {
		ok = link(temporary, path) == 0 || errno == EEXIST;
		if (!ok)
			fail(error, "%s: cannot put in place: %s", path, strerror(errno));
		unlink(temporary);
	}
	free(topology);
	return ok;
}

/* ---- mapping --------------------------------------------------------------------------------------------------------- */

static struct sim_state *map_file(int fd, const char *path, char error[SIM_ERROR_LEN])
{
	struct stat status;
	if (fstat(fd, &status) != 0 || (uint64_t)status.st_size != sizeof(struct sim_state)) {
		fail(error, "%s: %lld bytes, expected %zu: made by another version, run aliquot-sim init again", path,
		     (long long)status.st_size, sizeof(struct sim_state));
		return NULL;
	}
	struct sim_state *state = mmap(NULL, sizeof *state, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (state == MAP_FAILED) {
		fail(error, "%s: cannot map: %s", path, strerror(errno));
		return NULL;
	}
	if (state->magic != SIM_STATE_MAGIC || state->abi != SIM_STATE_ABI) {
		fail(error, "%s: magic 0x%x ABI %u, expected 0x%x ABI %d: run aliquot-sim init again", path, state->magic, state->abi,
		     SIM_STATE_MAGIC, SIM_STATE_ABI);
		munmap(state, sizeof *state);
		return NULL;
	}
	return state;
}

struct sim_state *sim_state_open(const char *dir, char error[SIM_ERROR_LEN])
{
	char path[PATH_MAX];
	if (!state_path(dir, path, error))
		return NULL;
	if (mapped.state && strcmp(mapped.dir, dir) == 0)
		return mapped.state;
	int fd = open(path, O_RDWR | O_CLOEXEC);
	if (fd < 0 && errno == ENOENT) {
		if (!create_from_topology(dir, path, error))
			return NULL;
		fd = open(path, O_RDWR | O_CLOEXEC);
	}
	if (fd < 0) {
		fail(error, "%s: cannot open: %s", path, strerror(errno));
		return NULL;
	}
	struct sim_state *state = map_file(fd, path, error);
	if (!state)
		/* the descriptor stays: closing it would drop record locks that this process may hold through another library */
		return NULL;
	mapped.state = state;
	mapped.fd = fd;
	snprintf(mapped.dir, sizeof mapped.dir, "%s", dir);
	return state;
}

struct sim_state *sim_state_map(char error[SIM_ERROR_LEN])
{
	const char *dir = getenv("ALIQUOT_SIM_DIR");
	if (!dir || dir[0] != '/') {
		fail(error, "ALIQUOT_SIM_DIR: expected the absolute path of a simulated node, found %s", dir ? dir : "nothing");
		return NULL;
	}
	return sim_state_open(dir, error);
}

/* ---- the mutex ------------------------------------------------------------------------------------------------------- */

/* A robust mutex outlives its holder, but its wake-up does not: killed after its unlock and before the wake, with another process taking
 * the mutex in between, it leaves a sleeper that neither the kernel nor the new holder knows of. So waiters look again from time to
 * time. */
#define FIRST_LOOK_NS 20000
#define RAREST_LOOK_NS 1000000

static int take_mutex(pthread_mutex_t *mutex)
{
	struct timespec pause = { .tv_nsec = FIRST_LOOK_NS };
	int status;
	while ((status = pthread_mutex_trylock(mutex)) == EBUSY) {
		nanosleep(&pause, NULL);
		pause.tv_nsec = 2 * pause.tv_nsec < RAREST_LOOK_NS ? 2 * pause.tv_nsec : RAREST_LOOK_NS;
	}
	return status;
}

void sim_lock(struct sim_state *state)
{
	int status = take_mutex(&state->mutex);
	if (status == EOWNERDEAD) {
		pthread_mutex_consistent(&state->mutex);
		sim_repair_locked(state);
		return;
	}
	if (status != 0) {
		/* Only a scribbled-over state file gets here. To go on without the lock would spread the damage. */
		fprintf(stderr, "aliquot simulated driver: the mutex of %s/state is damaged (%s): run aliquot-sim init again\n", mapped.dir,
			strerror(status));
		abort();
	}
}

void sim_unlock(struct sim_state *state)
{
	pthread_mutex_unlock(&state->mutex);
}

/* ---- faults ---------------------------------------------------------------------------------------------------------- */

static void wake_all(_Atomic uint32_t *word)
{
	syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static void bump_fault_epoch(struct sim_gpu_state *gpu)
{
	atomic_fetch_add(&gpu->fault_epoch, 1);
}

static void report_xid_locked(struct sim_gpu_state *gpu, int mig_device, uint32_t xid)
{
	uint32_t sequence = atomic_load(&gpu->xid_sequence) + 1;
	struct sim_xid_event *event = &gpu->xids[sequence % SIM_XID_RING];
	atomic_store_explicit(&event->sequence, 0, memory_order_relaxed);
	atomic_thread_fence(memory_order_release);
	event->xid = xid;
	event->time_ns = wall_clock_ns();
	event->mig_device = mig_device;
	atomic_store_explicit(&event->sequence, sequence, memory_order_release);    /* pairs with the acquire of the ring's readers */
	atomic_store(&gpu->xid_sequence, sequence);
	wake_all(&gpu->xid_sequence);
}

void sim_fault_set_lost(struct sim_state *state, uint32_t gpu, bool lost)
{
	struct sim_gpu_state *line = &state->gpus[gpu];
	sim_lock(state);
	if (lost && !atomic_load(&line->lost)) {
		atomic_fetch_add(&line->lost_incidents, 1);
		report_xid_locked(line, SIM_WHOLE_GPU, 79);
	}
	atomic_store(&line->lost, lost);
	bump_fault_epoch(line);
	sim_unlock(state);
	sim_ring_bell(state);
}

void sim_fault_set_hang(struct sim_state *state, uint32_t gpu, uint32_t hang_ms)
{
	sim_lock(state);
	atomic_store(&state->gpus[gpu].hang_ms, hang_ms);
	bump_fault_epoch(&state->gpus[gpu]);
	sim_unlock(state);
}

void sim_fault_set_mismatch(struct sim_state *state, bool mismatch)
{
	atomic_store(&state->driver_mismatch, mismatch);
}

void sim_fault_ecc(struct sim_state *state, uint32_t gpu, bool uncorrected, uint64_t count)
{
	struct sim_gpu_state *line = &state->gpus[gpu];
	sim_lock(state);
	if (uncorrected) {
		atomic_fetch_add(&line->ecc_uncorrected_volatile, count);
		atomic_fetch_add(&line->ecc_uncorrected_aggregate, count);
		atomic_store(&line->row_remap_pending, 1);
		atomic_fetch_add(&line->ecc_incidents, 1);
		bump_fault_epoch(line);
		report_xid_locked(line, SIM_WHOLE_GPU, 48);
	} else {
		atomic_fetch_add(&line->ecc_corrected_volatile, count);
		atomic_fetch_add(&line->ecc_corrected_aggregate, count);
	}
	sim_unlock(state);
	sim_ring_bell(state);
}

void sim_fault_xid(struct sim_state *state, uint32_t gpu, int mig_device, uint32_t xid)
{
	sim_lock(state);
	report_xid_locked(&state->gpus[gpu], mig_device, xid);
	sim_unlock(state);
	sim_ring_bell(state);
}

void sim_fault_clear(struct sim_state *state, uint32_t gpu)
{
	struct sim_gpu_state *line = &state->gpus[gpu];
	sim_lock(state);
	atomic_store(&line->lost, 0);
	atomic_store(&line->hang_ms, 0);
	atomic_store(&line->row_remap_pending, 0);
	atomic_store(&line->ecc_corrected_volatile, 0);
	atomic_store(&line->ecc_uncorrected_volatile, 0);
	bump_fault_epoch(line);
	sim_unlock(state);
	sim_ring_bell(state);
}

/* ---- visibility ------------------------------------------------------------------------------------------------------ */

void sim_visibility_from_environment(struct sim_visibility *out)
{
	static const char prefix[] = "ALIQUOT_SIM_DEVICE_";
	memset(out, 0, sizeof *out);
	for (char **entry = environ; entry && *entry; entry++) {
		const char *value = strchr(*entry, '=');
		if (strncmp(*entry, prefix, sizeof prefix - 1) != 0 || !value)
			continue;
		out->restricted = true;     /* an empty or overlong value still closes: it names no device */
		if (out->n_uuids < SIM_MAX_VISIBLE && strlen(value + 1) < SIM_UUID_LEN)
			strcpy(out->uuids[out->n_uuids++], value + 1);
	}
}

bool sim_visibility_allows(const struct sim_visibility *visibility, const char *uuid)
{
	if (!visibility->restricted)
		return true;
	for (uint32_t i = 0; i < visibility->n_uuids; i++)
		if (strcmp(visibility->uuids[i], uuid) == 0)
			return true;
	return false;
}

/* ---- waiting for events ---------------------------------------------------------------------------------------------- */

void sim_ring_bell(struct sim_state *state)
{
	atomic_fetch_add(&state->settings.bell, 1);
	wake_all(&state->settings.bell);
}

bool sim_wait_bell(struct sim_state *state, uint32_t seen, uint32_t timeout_ms)
{
	struct timespec timeout = { .tv_sec = timeout_ms / 1000, .tv_nsec = (long)(timeout_ms % 1000) * 1000000 };
	return syscall(SYS_futex, &state->settings.bell, FUTEX_WAIT, seen, &timeout, NULL, 0) == 0 || errno != ETIMEDOUT;
}
