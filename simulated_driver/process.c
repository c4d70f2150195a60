/* SPDX-License-Identifier: Apache-2.0 */
/* process.c - process slots, their liveness, and the accounting of device memory and SM time. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "simulated_driver/state_internal.h"

/* Record locks lie far behind the file's end, one byte per slot, so that they can never meet a lock that means something else. */
#define LOCK_OFFSET (INT64_C(1) << 40)
#define REPAIR_PATIENCE_NS 200000000ull
_Static_assert(SIM_MAX_SLOTS <= 512, "a recorder has nine bits for its slot");

/* ---- identity of processes ----------------------------------------------------------------------------------------- */

struct identity {
	uint32_t pid;
	uint64_t pid_namespace;
	uint64_t start_time;
};

/* Field 22 of /proc/self/stat, counted after the last ')' because the command name may hold anything. 0 when /proc is not mounted. */
static uint64_t own_start_time(void)
{
	char text[1024];
	int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t length = read(fd, text, sizeof text - 1);
	close(fd);
	if (length <= 0)
		return 0;
	text[length] = '\0';
	char *cursor = strrchr(text, ')');
	for (int field = 2; cursor && field < 22; field++)
		cursor = strchr(cursor + 1, ' ');
	return cursor ? strtoull(cursor + 1, NULL, 10) : 0;
}

static struct identity own_identity(void)
{
	struct stat status;
	struct identity me = { .pid = (uint32_t)getpid(), .start_time = own_start_time() };
	if (stat("/proc/self/ns/pid", &status) == 0)
		me.pid_namespace = status.st_ino;
	return me;
}

static bool is_owner(const struct sim_slot *slot, const struct identity *who)
{
	return slot->owner_pid == who->pid && slot->owner_pid_namespace == who->pid_namespace && slot->start_time == who->start_time;
}

/* Whether another process has the record lock of a slot. */
static bool slot_locked(int index, pid_t *pid)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_OFFSET + index, .l_len = 1 };
	if (fcntl(sim_state_fd(), F_GETLK, &lock) != 0)
		return true;    /* unknown (the descriptor was closed): never take memory from a process that may be alive */
	*pid = lock.l_pid > 0 ? lock.l_pid : 0;
	return lock.l_type != F_UNLCK;
}

/* The holder of a slot's record lock. A process never conflicts with its own locks, so the caller's own slot has to be recognised first. */
static bool slot_alive(const struct sim_state *state, int index, const struct identity *me, pid_t *pid)
{
	if (is_owner(&state->slots[index], me)) {
		*pid = (pid_t)me->pid;
		return true;
	}
	return slot_locked(index, pid);
}

static void own_name(char name[SIM_PROCESS_NAME_LEN])
{
	char path[PATH_MAX];
	ssize_t length = readlink("/proc/self/exe", path, sizeof path - 1);
	if (length < 0)
		length = snprintf(path, sizeof path, "%s", program_invocation_short_name);
	size_t kept = (size_t)length < SIM_PROCESS_NAME_LEN ? (size_t)length : SIM_PROCESS_NAME_LEN - 1;
	memset(name, 0, SIM_PROCESS_NAME_LEN);
	memcpy(name, path + length - kept, kept);
}

bool sim_next_ended(struct sim_state *state, int *cursor, struct sim_process *out)
{
	int high = (int)atomic_load(&state->slots_high);
	struct identity me = own_identity();
	pid_t holder;
	for (; *cursor < high; (*cursor)++) {
		const struct sim_slot *slot = &state->slots[*cursor];
		if (slot->owner_pid_namespace != me.pid_namespace)
			continue;
		if (atomic_load_explicit(&slot->state, memory_order_acquire) == SIM_SLOT_CLAIMED &&
		    slot_alive(state, *cursor, &me, &holder))
			continue;
		*out = (struct sim_process){ .slot = *cursor, .pid = (pid_t)slot->owner_pid, .start_time = slot->start_time };
		(*cursor)++;
		return true;
	}
	return false;
}

bool sim_next_process(struct sim_state *state, int *cursor, struct sim_process *out)
{
	int high = (int)atomic_load(&state->slots_high);
	struct identity me = own_identity();
	for (; *cursor < high; (*cursor)++) {
		const struct sim_slot *slot = &state->slots[*cursor];
		if (atomic_load_explicit(&slot->state, memory_order_acquire) != SIM_SLOT_CLAIMED)
			continue;
		if (!slot_alive(state, *cursor, &me, &out->pid))
			continue;
		out->slot = *cursor;
		out->start_time = slot->start_time;
		memcpy(out->name, slot->name, sizeof out->name);
		out->name[sizeof out->name - 1] = '\0';
		(*cursor)++;
		return true;
	}
	return false;
}

/* ---- repair ---------------------------------------------------------------------------------------------------------- */

static _Atomic uint64_t *domain_counter(struct sim_state *state, uint32_t gpu, int mig_device, uint32_t gpu_instance)
{
	struct sim_gpu_state *line = &state->gpus[gpu];
	if (mig_device == SIM_WHOLE_GPU)
		return &line->used_bytes;
	return gpu_instance < SIM_MIG_MAX_GPU_INSTANCES ? &line->mig.gpu_instances[gpu_instance].used_bytes : NULL;
}

/* Wait until no process is half-way through a change on `gpu`. False: one stands still there (for example stopped by a debugger). */
static bool wait_for_intents(struct sim_state *state, uint32_t gpu)
{
	uint64_t deadline = sim_now_ns() + REPAIR_PATIENCE_NS;
	struct identity me = own_identity();
	pid_t pid;
	for (uint32_t i = 0; i < atomic_load(&state->slots_high); i++) {
		struct sim_slot *slot = &state->slots[i];
		while (atomic_load(&slot->state) == SIM_SLOT_CLAIMED && atomic_load(&slot->gpus[gpu].intent_bytes) != 0) {
			if (!slot_alive(state, (int)i, &me, &pid))
				break;
			if (sim_now_ns() > deadline)
				return false;
			nanosleep(&(struct timespec){ .tv_nsec = 20000 }, NULL);
		}
	}
	return true;
}

static void recompute(struct sim_state *state, uint32_t gpu)
{
	uint64_t whole = 0, instances[SIM_MIG_MAX_GPU_INSTANCES] = { 0 };
	for (uint32_t i = 0; i < atomic_load(&state->slots_high); i++) {
		const struct sim_slot_gpu *held = &state->slots[i].gpus[gpu];
		if (atomic_load(&state->slots[i].state) != SIM_SLOT_CLAIMED)
			continue;
		uint64_t bytes = atomic_load(&held->used_bytes);
		uint32_t instance = atomic_load(&held->gpu_instance);
		if (atomic_load(&held->mig_device) == SIM_WHOLE_GPU)
			whole += bytes;
		else if (instance < SIM_MIG_MAX_GPU_INSTANCES)
			instances[instance] += bytes;
	}
	for (uint32_t i = 0; i < SIM_MAX_SHARED; i++) {
		const struct sim_shared_allocation *shared = &state->shared[i];
		if (shared->inode == 0 || shared->gpu != gpu)
			continue;
		if (shared->mig_device == SIM_WHOLE_GPU)
			whole += shared->bytes;
		else if (shared->gpu_instance < SIM_MIG_MAX_GPU_INSTANCES)
			instances[shared->gpu_instance] += shared->bytes;
	}
	atomic_store(&state->gpus[gpu].used_bytes, whole);
	for (uint32_t i = 0; i < SIM_MIG_MAX_GPU_INSTANCES; i++)
		atomic_store(&state->gpus[gpu].mig.gpu_instances[i].used_bytes, instances[i]);
}

/* Why it is right: `repair` goes up, and only then the intents are read; an accounting thread raises its intent, and only then reads
 * `repair` (all sequentially consistent). So either it sees `repair` and changes nothing, or its intent is seen here and waited for. */
static void repair_gpu_locked(struct sim_state *state, uint32_t gpu)
{
	struct sim_gpu_state *line = &state->gpus[gpu];
	atomic_store(&line->repair, 1);
	line->repair_due = !wait_for_intents(state, gpu);
	if (!line->repair_due)
		recompute(state, gpu);
	atomic_store(&line->repair, 0);
}

/* ---- reaping --------------------------------------------------------------------------------------------------------- */

bool sim_shared_path(uint64_t inode, char *path, size_t size)
{
	return snprintf(path, size, "%s/shared-%llu", sim_state_dir(), (unsigned long long)inode) < (int)size;
}

static bool has_holder(const uint64_t holders[SIM_MAX_SLOTS / 64])
{
	for (size_t i = 0; i < SIM_MAX_SLOTS / 64; i++)
		if (holders[i])
			return true;
	return false;
}

static bool is_holder(const uint64_t holders[SIM_MAX_SLOTS / 64], int slot)
{
	return holders[slot / 64] >> (slot % 64) & 1;
}

static void drop_event_holder_locked(struct sim_shared_event *event, int slot)
{
	event->holders[slot / 64] &= ~(UINT64_C(1) << (slot % 64));
	if (!has_holder(event->holders))
		event->id = 0;
}

static void drop_holder_locked(struct sim_state *state, struct sim_shared_allocation *shared, int slot)
{
	shared->holders[slot / 64] &= ~(UINT64_C(1) << (slot % 64));
	if (has_holder(shared->holders))
		return;
	_Atomic uint64_t *counter = domain_counter(state, shared->gpu, shared->mig_device, shared->gpu_instance);
	char path[PATH_MAX];
	if (shared->has_name && sim_shared_path(shared->inode, path, sizeof path))
		unlink(path);
	shared->inode = 0;
	if (counter)
		atomic_fetch_sub(counter, shared->bytes);
}

/* A dead process's slot. If it died half-way through a change, it is unknown whether the domain has the change: those GPUs must be
 * recomputed. */
static void free_slot_locked(struct sim_state *state, int index, bool repair[SIM_MAX_GPUS])
{
	struct sim_slot *slot = &state->slots[index];
	for (uint32_t i = 0; i < SIM_MAX_SHARED; i++)
		if (state->shared[i].inode && is_holder(state->shared[i].holders, index))
			drop_holder_locked(state, &state->shared[i], index);
	for (uint32_t i = 0; i < state->events_high; i++)
		if (state->events[i].id && is_holder(state->events[i].holders, index))
			drop_event_holder_locked(&state->events[i], index);
	for (uint32_t gpu = 0; gpu < state->topology.n_gpus; gpu++) {
		struct sim_slot_gpu *held = &slot->gpus[gpu];
		uint64_t bytes = atomic_exchange(&held->used_bytes, 0);
		_Atomic uint64_t *counter = domain_counter(state, gpu, atomic_load(&held->mig_device), atomic_load(&held->gpu_instance));
		if (atomic_exchange(&held->intent_bytes, 0) != 0)
			repair[gpu] = true;
		else if (counter)
			atomic_fetch_sub(counter, bytes);
		atomic_store(&held->contexts, 0);
		atomic_store(&held->kernels_since_ns, 0);
		atomic_store(&held->kernels_told_ns, 0);
		atomic_store(&held->kernels_left_ns, 0);
		atomic_store(&held->before_since_ns, 0);
		atomic_store(&held->before_end_ns, 0);
	}
	atomic_store_explicit(&slot->state, SIM_SLOT_FREE, memory_order_release);
}

int sim_reap_locked(struct sim_state *state)
{
	bool repair[SIM_MAX_GPUS] = { false };
	struct identity me = own_identity();
	int reaped = 0;
	pid_t pid;
	for (uint32_t i = 0; i < atomic_load(&state->slots_high); i++) {
		if (atomic_load(&state->slots[i].state) != SIM_SLOT_CLAIMED || slot_alive(state, (int)i, &me, &pid))
			continue;
		free_slot_locked(state, (int)i, repair);
		reaped++;
	}
	for (uint32_t gpu = 0; gpu < state->topology.n_gpus; gpu++)
		if (repair[gpu] || state->gpus[gpu].repair_due)
			repair_gpu_locked(state, gpu);
	return reaped;
}

int sim_reap(struct sim_state *state)
{
	sim_lock(state);
	int reaped = sim_reap_locked(state);
	sim_unlock(state);
	return reaped;
}

void sim_repair_locked(struct sim_state *state)
{
	for (uint32_t gpu = 0; gpu < state->topology.n_gpus; gpu++)
		state->gpus[gpu].repair_due = 1;
	sim_reap_locked(state);
}

/* ---- slots ----------------------------------------------------------------------------------------------------------- */

/* Take the record lock of slot `index`. False: another process has it. */
static bool lock_slot(int index)
{
	struct flock lock = { .l_type = F_WRLCK, .l_whence = SEEK_SET, .l_start = LOCK_OFFSET + index, .l_len = 1 };
	return fcntl(sim_state_fd(), F_SETLK, &lock) == 0;
}

/* Did its last owner run kernels so lately that samples still name it? */
static bool is_sampled(const struct sim_state *state, int index, uint64_t now_ns)
{
	for (uint32_t gpu = 0; gpu < state->topology.n_gpus; gpu++)
		if (sim_slot_busy_ns(&state->slots[index], gpu, now_ns, SIM_BUSY_BUCKETS * SIM_BUCKET_NS))
			return true;
	return false;
}

/* The first free slot, locked; -1 when there is none. A process that is killed while it claims a slot gives back the mutex first and
 * its record lock a moment later: until then its slot is free and cannot be locked, and the next one serves. */
static int lock_free_slot(const struct sim_state *state, bool sampled_too)
{
	uint64_t now_ns = sim_now_ns();
	for (int i = 0; i < SIM_MAX_SLOTS; i++)
		if (atomic_load(&state->slots[i].state) == SIM_SLOT_FREE && (sampled_too || !is_sampled(state, i, now_ns)) && lock_slot(i))
			return i;
	return -1;
}

static void fill_slot(struct sim_slot *slot)
{
	struct identity me = own_identity();
	slot->owner_pid = me.pid;
	slot->owner_pid_namespace = me.pid_namespace;
	slot->start_time = me.start_time;
	own_name(slot->name);
	atomic_store(&slot->mps_client, 0);
	for (uint32_t gpu = 0; gpu < SIM_MAX_GPUS; gpu++) {
		struct sim_slot_gpu *held = &slot->gpus[gpu];
		atomic_store(&held->mig_device, SIM_WHOLE_GPU);
		atomic_store(&held->gpu_instance, 0);
		atomic_store(&held->busy_total_ns, 0);
		for (int bucket = 0; bucket < SIM_BUSY_BUCKETS; bucket++)
			atomic_store_explicit(&held->busy[bucket], 0, memory_order_relaxed);
	}
	atomic_fetch_add(&slot->generation, 1);
	atomic_store_explicit(&slot->state, SIM_SLOT_CLAIMED, memory_order_release);
}

int sim_slot_claim(struct sim_state *state)
{
	sim_lock(state);
	int index = lock_free_slot(state, false);
	if (index < 0) {
		sim_reap_locked(state);
		index = lock_free_slot(state, true);
	}
	if (index >= 0) {
		fill_slot(&state->slots[index]);
		if ((uint32_t)index >= atomic_load(&state->slots_high))
			atomic_store(&state->slots_high, (uint32_t)index + 1);
	}
	sim_unlock(state);
	return index;
}

/* ---- accounting ------------------------------------------------------------------------------------------------------ */

bool sim_domain_of_gpu(struct sim_state *state, uint32_t gpu, struct sim_domain *out)
{
	if (gpu >= state->topology.n_gpus)
		return false;
	const struct sim_gpu *hardware = &state->topology.gpus[gpu];
	*out = (struct sim_domain){ .gpu = gpu,
				    .mig_device = SIM_WHOLE_GPU,
				    .capacity_bytes = hardware->memory_bytes - hardware->memory_reserved_bytes,
				    .used_bytes = &state->gpus[gpu].used_bytes };
	return true;
}

bool sim_domain_of_mig(struct sim_state *state, uint32_t gpu, uint32_t mig_device, struct sim_domain *out)
{
	if (gpu >= state->topology.n_gpus || mig_device >= SIM_MIG_MAX_DEVICES)
		return false;
	struct sim_mig *mig = &state->gpus[gpu].mig;
	const struct sim_compute_instance *device = &mig->devices[mig_device];
	if (!atomic_load_explicit(&device->present, memory_order_acquire))
		return false;
	struct sim_gpu_instance *instance = &mig->gpu_instances[device->gpu_instance_id];
	*out = (struct sim_domain){ .gpu = gpu,
				    .mig_device = (int32_t)mig_device,
				    .gpu_instance = device->gpu_instance_id,
				    .capacity_bytes = instance->memory_bytes,
				    .used_bytes = &instance->used_bytes };
	return true;
}

/* Announce a change. While another process recomputes this GPU, stand back until it is done: it holds the mutex throughout. */
static void announce(struct sim_state *state, struct sim_slot_gpu *held, uint32_t gpu, uint64_t bytes)
{
	for (;;) {
		atomic_exchange(&held->intent_bytes, bytes);
		if (__builtin_expect(!atomic_load(&state->gpus[gpu].repair), 1))
			return;
		atomic_store(&held->intent_bytes, 0);
		sim_lock(state);
		sim_unlock(state);
	}
}

static void done(struct sim_slot_gpu *held)
{
	atomic_store_explicit(&held->intent_bytes, 0, memory_order_release);
}

/* Compare-and-swap, not add and undo: a request that is refused must not make another one, which fits, fail meanwhile. */
static bool take(_Atomic uint64_t *used_bytes, uint64_t capacity, uint64_t bytes)
{
	uint64_t used = atomic_load_explicit(used_bytes, memory_order_relaxed);
	do {
		if (bytes > capacity || used > capacity - bytes)
			return false;
	} while (!atomic_compare_exchange_weak(used_bytes, &used, used + bytes));
	return true;
}

static bool try_reserve(struct sim_state *state, struct sim_slot_gpu *held, const struct sim_domain *domain, uint64_t bytes)
{
	announce(state, held, domain->gpu, bytes);
	bool taken = take(domain->used_bytes, domain->capacity_bytes, bytes);
	if (taken)  /* the slot's owner is its only writer, and the caller serialises: no read-modify-write needed */
		atomic_store_explicit(&held->used_bytes, atomic_load_explicit(&held->used_bytes, memory_order_relaxed) + bytes,
				      memory_order_relaxed);
	done(held);
	return taken;
}

bool sim_memory_reserve(struct sim_state *state, int slot, const struct sim_domain *domain, uint64_t bytes)
{
	struct sim_slot_gpu *held = &state->slots[slot].gpus[domain->gpu];
	if (bytes == 0 || __builtin_expect(try_reserve(state, held, domain, bytes), 1))
		return true;
	sim_reap(state);
	return try_reserve(state, held, domain, bytes);
}

void sim_memory_release(struct sim_state *state, int slot, const struct sim_domain *domain, uint64_t bytes)
{
	struct sim_slot_gpu *held = &state->slots[slot].gpus[domain->gpu];
	if (bytes == 0)
		return;
	announce(state, held, domain->gpu, bytes);
	atomic_store_explicit(&held->used_bytes, atomic_load_explicit(&held->used_bytes, memory_order_relaxed) - bytes,
			      memory_order_relaxed);
	atomic_fetch_sub(domain->used_bytes, bytes);
	done(held);
}

/* ---- exported allocations -------------------------------------------------------------------------------------------- */

static struct sim_shared_allocation *find_shared(struct sim_state *state, uint64_t device, uint64_t inode)
{
	for (uint32_t i = 0; i < SIM_MAX_SHARED; i++)
		if (state->shared[i].inode == inode && (inode == 0 || state->shared[i].device == device))
			return &state->shared[i];
	return NULL;
}

static void add_holder(struct sim_shared_allocation *shared, int slot)
{
	shared->holders[slot / 64] |= UINT64_C(1) << (slot % 64);
}

bool sim_shared_enter(struct sim_state *state, int slot, const struct sim_domain *domain, const struct sim_shared_file *file)
{
	struct sim_slot_gpu *held = &state->slots[slot].gpus[domain->gpu];
	sim_lock(state);
	struct sim_shared_allocation *shared = find_shared(state, 0, 0);
	if (!shared) {
		sim_reap_locked(state);
		shared = find_shared(state, 0, 0);
	}
	if (shared) {
		*shared = (struct sim_shared_allocation){ .device = file->device,
							  .bytes = file->bytes,
							  .gpu = domain->gpu,
							  .mig_device = domain->mig_device,
							  .gpu_instance = domain->gpu_instance,
							  .has_name = file->has_name };
		add_holder(shared, slot);
		shared->inode = file->inode;
		atomic_fetch_sub(&held->used_bytes, file->bytes);       /* it counts in the entry now; the domain's sum does not change */
	}
	sim_unlock(state);
	return shared != NULL;
}

bool sim_shared_join(struct sim_state *state, int slot, uint64_t device, uint64_t inode, struct sim_domain *domain, uint64_t *bytes)
{
	sim_lock(state);
	struct sim_shared_allocation *shared = inode ? find_shared(state, device, inode) : NULL;
	if (shared) {
		add_holder(shared, slot);
		*bytes = shared->bytes;
		bool known = shared->mig_device == SIM_WHOLE_GPU
				     ? sim_domain_of_gpu(state, shared->gpu, domain)
				     : sim_domain_of_mig(state, shared->gpu, (uint32_t)shared->mig_device, domain);
		if (!known) {
			drop_holder_locked(state, shared, slot);
			shared = NULL;
		}
	}
	sim_unlock(state);
	return shared != NULL;
}

void sim_shared_leave(struct sim_state *state, int slot, uint64_t device, uint64_t inode)
{
	sim_lock(state);
	struct sim_shared_allocation *shared = inode ? find_shared(state, device, inode) : NULL;
	if (shared)
		drop_holder_locked(state, shared, slot);
	sim_unlock(state);
}

/* The first holder pays: a number that one process shows and no two. */
static bool pays(const struct sim_shared_allocation *shared, int slot)
{
	for (int i = 0; i < slot / 64; i++)
		if (shared->holders[i])
			return false;
	uint64_t word = shared->holders[slot / 64];
	return word && __builtin_ctzll(word) == slot % 64;
}

uint64_t sim_slot_used_bytes(struct sim_state *state, int slot, uint32_t gpu)
{
	sim_lock(state);
	uint64_t bytes = atomic_load(&state->slots[slot].gpus[gpu].used_bytes);
	for (uint32_t i = 0; i < SIM_MAX_SHARED; i++) {
		const struct sim_shared_allocation *shared = &state->shared[i];
		if (shared->inode && shared->gpu == gpu && pays(shared, slot))
			bytes += shared->bytes;
	}
	sim_unlock(state);
	return bytes;
}

/* ---- events of several processes ------------------------------------------------------------------------------------- */

static struct sim_shared_event *unused_event(struct sim_state *state)
{
	for (uint32_t i = 0; i < SIM_MAX_EVENTS; i++)
		if (state->events[i].id == 0)
			return &state->events[i];
	return NULL;
}

struct sim_shared_event *sim_event_entry_new(struct sim_state *state, int slot)
{
	sim_lock(state);
	struct sim_shared_event *entry = unused_event(state);
	if (!entry) {
		sim_reap_locked(state);
		entry = unused_event(state);
	}
	if (entry) {
		uint32_t index = (uint32_t)(entry - state->events);
		memset(entry, 0, sizeof *entry);
		entry->holders[slot / 64] |= UINT64_C(1) << (slot % 64);
		entry->id = ++state->last_event_id;
		if (index >= state->events_high)
			state->events_high = index + 1;
	}
	sim_unlock(state);
	return entry;
}

struct sim_shared_event *sim_event_entry_join(struct sim_state *state, int slot, uint32_t index, uint64_t id)
{
	if (index >= SIM_MAX_EVENTS || id == 0)
		return NULL;
	struct sim_shared_event *entry = &state->events[index];
	sim_lock(state);
	bool there = entry->id == id;
	if (there)
		entry->holders[slot / 64] |= UINT64_C(1) << (slot % 64);
	sim_unlock(state);
	return there ? entry : NULL;
}

void sim_event_entry_leave(struct sim_state *state, int slot, struct sim_shared_event *entry)
{
	sim_lock(state);
	drop_event_holder_locked(entry, slot);
	sim_unlock(state);
}

#define GENERATION_BITS 15  /* of a recorder; its slot has the others */

uint64_t sim_recorder_of_slot(const struct sim_state *state, int slot)
{
	uint64_t generation = atomic_load(&state->slots[slot].generation) & ((1u << GENERATION_BITS) - 1);
	return (uint64_t)slot << GENERATION_BITS | generation;
}

bool sim_recorder_lives(const struct sim_state *state, uint64_t ticket)
{
	pid_t pid;
	uint64_t recorder = ticket & ((UINT64_C(1) << SIM_RECORDER_BITS) - 1);
	int slot = (int)(recorder >> GENERATION_BITS);
	return atomic_load(&state->slots[slot].state) == SIM_SLOT_CLAIMED && sim_recorder_of_slot(state, slot) == recorder &&
	       slot_locked(slot, &pid);
}

/* ---- sharing the SMs ------------------------------------------------------------------------------------------------- */

static uint64_t kernels_left(const struct sim_slot_gpu *held)
{
	return atomic_load_explicit(&held->kernels_left_ns, memory_order_relaxed);
}
static uint64_t kernels_since(const struct sim_slot_gpu *held)
{
	return atomic_load_explicit(&held->kernels_since_ns, memory_order_relaxed);
}
static uint64_t before_since(const struct sim_slot_gpu *held)
{
	return atomic_load_explicit(&held->before_since_ns, memory_order_relaxed);
}
static uint64_t before_end(const struct sim_slot_gpu *held)
{
	return atomic_load_explicit(&held->before_end_ns, memory_order_relaxed);
}
static uint64_t kernels_told(const struct sim_slot_gpu *held)
{
	return atomic_load_explicit(&held->kernels_told_ns, memory_order_relaxed);
}

/* When its kernels end, at one part in `crowd` of the SMs. Without another word from it, it is not believed for long. */
static uint64_t kernels_end(const struct sim_slot_gpu *held, uint32_t crowd)
{
	uint64_t left = kernels_left(held);
	return kernels_told(held) + (left < SIM_STALL_NS / crowd ? left * crowd : SIM_STALL_NS);
}

uint32_t sim_sm_sharers(struct sim_state *state, int slot, uint32_t gpu, uint64_t at_ns, uint64_t *until_ns)
{
	int32_t mine = atomic_load(&state->slots[slot].gpus[gpu].mig_device);
	const struct sim_slot_gpu *others[SIM_MAX_SLOTS];
	uint32_t n_others = 0, crowd = 1, sharers = 1, high = atomic_load(&state->slots_high);
	for (uint32_t i = 0; i < high; i++) {
		const struct sim_slot_gpu *other = &state->slots[i].gpus[gpu];
		bool same_sms = (int)i != slot && atomic_load_explicit(&other->mig_device, memory_order_relaxed) == mine;
		if (!same_sms || kernels_told(other) + SIM_STALL_NS <= at_ns)
			continue;
		others[n_others++] = other;
		crowd += kernels_left(other) != 0;
	}
	for (uint32_t i = 0; i < n_others; i++) {
		const uint64_t changes[] = { before_since(others[i]), before_end(others[i]), kernels_since(others[i]),
					     kernels_end(others[i], crowd) };
		uint32_t next = 0;
		while (next < 4 && changes[next] <= at_ns)
			next++;
		sharers += next & 1; /* between a beginning and an end */
		if (next < 4 && changes[next] < *until_ns)
			*until_ns = changes[next];
	}
	return sharers;
}

uint64_t sim_slot_busy_ns(const struct sim_slot *slot, uint32_t gpu, uint64_t now_ns, uint64_t window_ns)
{
	uint64_t last = now_ns / SIM_BUCKET_NS, count = (window_ns + SIM_BUCKET_NS - 1) / SIM_BUCKET_NS, busy = 0;
	if (count > SIM_BUSY_BUCKETS)
		count = SIM_BUSY_BUCKETS;
	for (uint64_t i = 0; i < count && i <= last; i++) {
		uint64_t word = atomic_load_explicit(&slot->gpus[gpu].busy[(last - i) % SIM_BUSY_BUCKETS], memory_order_relaxed);
		if (word >> SIM_BUSY_BITS == last - i)
			busy += word & ((UINT64_C(1) << SIM_BUSY_BITS) - 1);
	}
	return busy;
}

static bool on_device(const struct sim_slot_gpu *held, int mig_device)
{
	return mig_device == SIM_MIG_ANY_DEVICE || atomic_load(&held->mig_device) == mig_device;
}

uint64_t sim_gpu_busy_ns(struct sim_state *state, uint32_t gpu, int mig_device, uint64_t now_ns, uint64_t window_ns)
{
	uint64_t busy = 0;
	int cursor = 0;
	struct sim_process process;
	while (sim_next_process(state, &cursor, &process))
		if (on_device(&state->slots[process.slot].gpus[gpu], mig_device))
			busy += sim_slot_busy_ns(&state->slots[process.slot], gpu, now_ns, window_ns);
	return busy < window_ns ? busy : window_ns;
}

uint32_t sim_gpu_contexts(struct sim_state *state, uint32_t gpu, int mig_device)
{
	uint32_t contexts = 0;
	int cursor = 0;
	struct sim_process process;
	while (sim_next_process(state, &cursor, &process))
		if (on_device(&state->slots[process.slot].gpus[gpu], mig_device))
			contexts += atomic_load(&state->slots[process.slot].gpus[gpu].contexts);
	return contexts;
}
