/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The state of one simulated node: one mapped file that every process of the node shares.
 *
 * Why it exists: device memory, GPU time, MIG instances, faults and the list of client processes belong to the machine, not to a process.
 * libcuda, libnvidia-ml and aliquot-sim map the same file (`state` in ALIQUOT_SIM_DIR) and meet here only.
 *
 * Invariant at every instant, including after SIGKILL at any instruction:
 *   - a memory domain (a GPU, or a MIG GPU instance) never promises more than its capacity;
 *   - its `used_bytes` is the sum over live process slots and exported allocations, once dead slots are reaped (sim_reap);
 *   - no lock is held across a system call that can wait, and the one mutex is robust: the next taker repairs what a dead holder left.
 *
 * How changes are protected: accounting is atomic (see sim_memory_reserve); slots, MIG instances, shared allocations and faults change
 * under sim_lock. Liveness is a POSIX record lock on the slot's byte: the kernel drops it at death, and F_GETLK returns the holder's pid in
 * the caller's pid namespace. Therefore no code here ever closes a descriptor of the state file. The hardware description is topology.h,
 * MIG tables are mig.h; cuda*.c and nvml*.c present all this to CUDA and NVML.
 */
#ifndef ALIQUOT_SIM_STATE_H
#define ALIQUOT_SIM_STATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "simulated_driver/mig.h"
#include "simulated_driver/settings.h"
#include "simulated_driver/topology.h"

#define SIM_STATE_MAGIC 0x4d495341u       /* "ASIM" in memory */
#define SIM_STATE_ABI 3

#define SIM_MAX_SLOTS 512            /* CUDA processes at one time on one node */
#define SIM_BUSY_BUCKETS 64          /* of SIM_BUCKET_NS each: utilisation can be queried for the last 6.4 s */
#define SIM_BUCKET_NS 100000000ull
#define SIM_BUSY_BITS 27             /* low bits of a bucket word: busy ns (at most SIM_BUCKET_NS); the rest: bucket number */
#define SIM_XID_RING 64
#define SIM_MAX_SHARED 1024          /* allocations that were exported to other processes */
#define SIM_MAX_EVENTS 8192          /* events that several processes may use */
#define SIM_WHOLE_GPU (-1)           /* "MIG device index" of a GPU that is not partitioned */
#define SIM_PROCESS_NAME_LEN 64
#define SIM_ERROR_LEN 512

/* ---- per GPU --------------------------------------------------------------------------------------------------------- */

/* One XID: written under sim_lock, `sequence` last with release. Sequence n lies in entry n % SIM_XID_RING; the first is 1. */
struct sim_xid_event {
	_Atomic uint32_t sequence;
	uint32_t xid;
	uint64_t time_ns;                    /* CLOCK_REALTIME */
	int32_t mig_device;                 /* index in sim_mig.devices, or SIM_WHOLE_GPU */
	uint32_t unused;
};

struct sim_gpu_state {
	_Alignas(64) _Atomic uint64_t used_bytes;   /* device memory held by processes; only the whole-GPU domain, MIG has its own */
	_Atomic uint32_t repair;                    /* not 0: the domains of this GPU are being recomputed, account after sim_lock */
	uint32_t repair_due;                        /* a repair could not finish because a process stood still half-way; under sim_lock */

	/* changes with every fault set or cleared: one load tells CUDA whether anything changed */
	_Alignas(64) _Atomic uint32_t fault_epoch;
	_Atomic uint32_t lost; /* fallen off the bus */
	_Atomic uint32_t hang_ms; /* every call that reaches the GPU takes this much longer */
	/* times it fell off the bus: ends the contexts of the time, also those that did not look */
	_Atomic uint32_t lost_incidents;
	_Atomic uint32_t ecc_incidents; /* uncorrectable errors: the same */
	_Atomic uint32_t ecc_mode_pending; /* ECC mode after the next reset: 0 off, 1 on */
	_Atomic uint32_t row_remap_pending; /* a row waits for a reset to be remapped */
	_Atomic uint64_t ecc_corrected_volatile, ecc_corrected_aggregate;
	_Atomic uint64_t ecc_uncorrected_volatile, ecc_uncorrected_aggregate;
	_Atomic uint64_t contexts_created; /* since boot */

	_Alignas(64) _Atomic uint32_t xid_sequence; /* of the newest entry; also a futex word to wait on */
	struct sim_xid_event xids[SIM_XID_RING];

	struct sim_mig mig;
};

/* ---- per process ----------------------------------------------------------------------------------------------------- */

/* What one process holds on one GPU, or on the one MIG device of that GPU that it uses. The owner writes; anyone reads. */
struct sim_slot_gpu {
	_Alignas(64) _Atomic uint64_t used_bytes; /* contexts and allocations */
	_Atomic uint64_t intent_bytes; /* not 0: a change of used_bytes by this much is under way */
	_Atomic int32_t mig_device; /* SIM_WHOLE_GPU, or the index in sim_mig.devices */
	_Atomic uint32_t gpu_instance; /* its GPU instance; meaningless for a whole GPU */
	_Atomic uint32_t contexts;
	uint32_t unused;
	_Atomic uint64_t kernels_since_ns; /* CLOCK_MONOTONIC; since when there have been kernels to run, see sim_sm_sharers */
	_Atomic uint64_t kernels_told_ns; /* … of the engine's last step; of their end, when no kernel is left */
	_Atomic uint64_t kernels_left_ns; /* SM time that they needed then */
	_Atomic uint64_t before_since_ns; /* … the time before that with kernels to run: */
	_Atomic uint64_t before_end_ns; /* for a reader that looks late */
	_Atomic uint64_t busy_total_ns; /* SM time since the slot was claimed */
	/* bucket number << SIM_BUSY_BITS | busy ns; bucket number = CLOCK_MONOTONIC / SIM_BUCKET_NS */
	_Atomic uint64_t busy[SIM_BUSY_BUCKETS];
};

enum sim_slot_state { SIM_SLOT_FREE = 0, SIM_SLOT_CLAIMED = 1 };

struct sim_slot {
	_Alignas(64) _Atomic uint32_t state;
	_Atomic uint32_t generation; /* counts claims, so that an owner notices the loss of its slot */
	uint32_t owner_pid; /* as the owner sees itself; other processes use sim_process.pid */
	_Atomic uint32_t mps_client; /* an MPS control daemon took it; reported by its libcuda */
	uint64_t owner_pid_namespace; /* inode of /proc/self/ns/pid */
	uint64_t start_time; /* of the owner, in clock ticks since boot */
	char name[SIM_PROCESS_NAME_LEN]; /* path of the executable, its end when too long */
	struct sim_slot_gpu gpus[SIM_MAX_GPUS];
};

/* An exported allocation: it counts here and in no slot, and lives while any holder does. Changes under sim_lock. */
struct sim_shared_allocation {
	uint64_t device, inode; /* of the file that backs it: its identity; inode 0 = entry free */
	uint64_t bytes;
	uint32_t gpu;
	int32_t mig_device;
	uint32_t gpu_instance;
	/* the file is in the node's directory, as in sim_shared_path, and goes with the entry */
	uint32_t has_name;
	uint64_t holders[SIM_MAX_SLOTS / 64];
};

/* The records of an event. A ticket is a number that counts them, above SIM_RECORDER_BITS bits that name who recorded: 0 when only one
 * process can. Of two tickets of an event, the later one is greater. */
#define SIM_RECORDER_BITS 24
struct sim_event_times {
	_Atomic uint64_t recorded; /* ticket of the newest record; 0: never */
	_Atomic uint64_t finished; /* newest ticket that came to pass */
	_Atomic uint64_t time_ns; /* simulated GPU time of that */
};

/* An event that several processes may use. It lives while any holder does. Holders change under sim_lock. */
struct sim_shared_event {
	uint64_t id; /* of all events of the node; 0 = entry free */
	struct sim_event_times times;
	uint64_t holders[SIM_MAX_SLOTS / 64];
};

/* ---- the node -------------------------------------------------------------------------------------------------------- */

struct sim_state {
	uint32_t magic, abi;
	uint64_t size;
	struct sim_topology topology; /* never changes after creation */
	pthread_mutex_t mutex; /* robust, process-shared; take it with sim_lock */
	_Atomic uint32_t driver_mismatch; /* library and kernel module differ in version: nothing initialises */
	_Atomic uint32_t slots_high; /* slots at and above this index were never claimed */
	uint64_t boot_time_ns; /* CLOCK_REALTIME of creation */
	struct sim_shared_allocation shared[SIM_MAX_SHARED];
	uint64_t last_event_id; /* under sim_lock, as the next */
	uint32_t events_high; /* entries at and above this index were never used */
	struct sim_shared_event events[SIM_MAX_EVENTS];
	struct sim_gpu_state gpus[SIM_MAX_GPUS];
	struct sim_slot slots[SIM_MAX_SLOTS];
	struct sim_settings settings;
};

/* Map the node named by ALIQUOT_SIM_DIR, creating `state` from `topology` when it is missing. NULL, and a sentence in `error`, on failure.
 * The mapping and its descriptor stay for the life of the process. One call per library; not thread-safe. */
struct sim_state *sim_state_map(char error[SIM_ERROR_LEN]);

/* The same for a given directory. */
struct sim_state *sim_state_open(const char *dir, char error[SIM_ERROR_LEN]);

/* Write a fresh state for `topology` into `dir`, replacing an old one (its users keep the old file and never meet the new users). */
bool sim_state_create(const char *dir, const struct sim_topology *topology, char error[SIM_ERROR_LEN]);

/* The directory that was mapped. */
const char *sim_state_dir(void);

/* The node's one mutex. sim_lock never fails: what a dead holder left half done is repaired before it returns. Not recursive. */
void sim_lock(struct sim_state *state);
void sim_unlock(struct sim_state *state);

uint64_t sim_now_ns(void); /* CLOCK_MONOTONIC, the clock of all busy accounting; one for the whole machine */

/* ---- processes ------------------------------------------------------------------------------------------------------- */

struct sim_process {
	int slot;
	pid_t pid; /* in the caller's pid namespace; 0 when it is not visible there */
	uint64_t start_time;
	char name[SIM_PROCESS_NAME_LEN];
};

/* Next live process at or after *cursor (start with 0); advances the cursor. Takes no lock; dead slots are skipped, not reaped. */
bool sim_next_process(struct sim_state *state, int *cursor, struct sim_process *out);

/* The same for processes of the caller's pid namespace that have ended and still have their slot: `name` is empty. */
bool sim_next_ended(struct sim_state *state, int *cursor, struct sim_process *out);

/* Give back all that dead processes held. Takes sim_lock. Returns the number of slots reaped. */
int sim_reap(struct sim_state *state);

/* The same for a caller that holds sim_lock. */
int sim_reap_locked(struct sim_state *state);

/* Claim a slot for the calling process; -1 when SIM_MAX_SLOTS live processes exist. Takes sim_lock. */
int sim_slot_claim(struct sim_state *state);

/* Device memory that one process pays for on a GPU: its own, and what it exported or, the exporter gone, imported. */
uint64_t sim_slot_used_bytes(struct sim_state *state, int slot, uint32_t gpu);

/* Number of CUDA contexts of live processes on a GPU (SIM_MIG_ANY_DEVICE: on all its MIG devices and on the whole). */
#define SIM_MIG_ANY_DEVICE (-2)
uint32_t sim_gpu_contexts(struct sim_state *state, uint32_t gpu, int mig_device);

/* SM time in ns that `slot` took on `gpu` in the window of `window_ns` before `now_ns`, in whole buckets; the current one is the last. */
uint64_t sim_slot_busy_ns(const struct sim_slot *slot, uint32_t gpu, uint64_t now_ns, uint64_t window_ns);
/* The same summed over live processes on the whole GPU or one MIG device; at most window_ns. */
uint64_t sim_gpu_busy_ns(struct sim_state *state, uint32_t gpu, int mig_device, uint64_t now_ns, uint64_t window_ns);

/* ---- accounting (libcuda) -------------------------------------------------------------------------------------------- */

/* Where a process's memory on one GPU counts, and how much there is. */
struct sim_domain {
	uint32_t gpu;
	int32_t mig_device; /* SIM_WHOLE_GPU or index */
	uint32_t gpu_instance;
	uint64_t capacity_bytes;
	_Atomic uint64_t *used_bytes;
};

bool sim_domain_of_gpu(struct sim_state *state, uint32_t gpu, struct sim_domain *out);
bool sim_domain_of_mig(struct sim_state *state, uint32_t gpu, uint32_t mig_device, struct sim_domain *out);

/* Take `bytes` from the domain for `slot`, or refuse. The caller serialises its own calls per (slot, GPU). When there is not enough, dead
 * processes are reaped and it is tried once more. No lock and no system call otherwise. */
bool sim_memory_reserve(struct sim_state *state, int slot, const struct sim_domain *domain, uint64_t bytes);
void sim_memory_release(struct sim_state *state, int slot, const struct sim_domain *domain, uint64_t bytes);

/* Limits of cgroups (nvmlDeviceSetMemoryLimits_v1). `open` returns the cgroup's process list, or NULL. `used_bytes` reads it: what these
 * processes hold on a GPU, and whether the caller is one of them. `allow` is false when the caller's cgroup holds more than its limit: a
 * process that has just reserved gives back. */
FILE *sim_cgroup_open(const char *name);
uint64_t sim_cgroup_used_bytes(struct sim_state *state, uint32_t gpu, FILE *procs, bool *has_caller);
bool sim_cgroups_allow(struct sim_state *state, uint32_t gpu);

/* Exported allocations, named by the file that backs them. `enter` moves `bytes` that `slot` had reserved into an entry it holds (false:
 * the table is full); `join` makes `slot` a holder too and fills `domain` and `bytes` (false: no such entry); `leave` drops it, and with
 * the last holder gives the memory back. The caller of enter serialises with its own reserve and release on that GPU. */
struct sim_shared_file {
	uint64_t device, inode, bytes;
	bool has_name;
};
bool sim_shared_enter(struct sim_state *state, int slot, const struct sim_domain *domain, const struct sim_shared_file *file);
bool sim_shared_join(struct sim_state *state, int slot, uint64_t device, uint64_t inode, struct sim_domain *domain, uint64_t *bytes);
void sim_shared_leave(struct sim_state *state, int slot, uint64_t device, uint64_t inode);
/* Path of the file of an entry that has a name; false when it is too long. */
bool sim_shared_path(uint64_t inode, char *path, size_t size);

/* Events that several processes may use. `new` returns an entry that `slot` holds (NULL: the table is full), `join` makes `slot` hold
 * one too (NULL: it no longer exists), `leave` ends that. */
struct sim_shared_event *sim_event_entry_new(struct sim_state *state, int slot);
struct sim_shared_event *sim_event_entry_join(struct sim_state *state, int slot, uint32_t index, uint64_t id);
void sim_event_entry_leave(struct sim_state *state, int slot, struct sim_shared_event *entry);
/* Who records: a claimed slot. `lives` is for others than the caller itself. */
uint64_t sim_recorder_of_slot(const struct sim_state *state, int slot);
bool sim_recorder_lives(const struct sim_state *state, uint64_t ticket);

/* Number of processes, including the caller, that have work at `at_ns` for the same SMs as `slot` on `gpu`. Stalled and dead ones do not
 * count. In `until_ns`: a later time; out: the time at which the number changes, if that is earlier. Others need not have looked at their
 * own queues for that: what they published last says when their kernels end. */
uint32_t sim_sm_sharers(struct sim_state *state, int slot, uint32_t gpu, uint64_t at_ns, uint64_t *until_ns);
#define SIM_STALL_NS 50000000ull                /* an engine that has not stepped for this long is stopped, dead or starved: no share */

/* ---- faults ---------------------------------------------------------------------------------------------------------- */

/* Each takes sim_lock, takes effect on running clients at their next call, and wakes waiters for events. */
void sim_fault_set_lost(struct sim_state *state, uint32_t gpu, bool lost); /* also reports XID 79 when set */
void sim_fault_set_hang(struct sim_state *state, uint32_t gpu, uint32_t hang_ms); /* 0: as usual again */
void sim_fault_set_mismatch(struct sim_state *state, bool mismatch);
/* uncorrected: ends contexts, XID 48, row remap pending */
void sim_fault_ecc(struct sim_state *state, uint32_t gpu, bool uncorrected, uint64_t count);
void sim_fault_xid(struct sim_state *state, uint32_t gpu, int mig_device, uint32_t xid); /* report only */
void sim_fault_clear(struct sim_state *state, uint32_t gpu); /* as after a GPU reset: volatile counters too */

/* ---- what a process may see ------------------------------------------------------------------------------------------ */

/* The values of ALIQUOT_SIM_DEVICE_<anything>, as a container's device nodes would be. Without any, everything is visible. */
#define SIM_MAX_VISIBLE 128
struct sim_visibility {
	bool restricted;
	uint32_t n_uuids;
	char uuids[SIM_MAX_VISIBLE][SIM_UUID_LEN];
};

void sim_visibility_from_environment(struct sim_visibility *out);
bool sim_visibility_allows(const struct sim_visibility *visibility, const char *uuid);

/* ---- waiting for events (libnvidia-ml) ------------------------------------------------------------------------------- */

/* Wake every waiter of every event set: each then looks at what changed on its GPUs. */
void sim_ring_bell(struct sim_state *state);

/* Sleep until the bell rings, unless it no longer shows `seen`, or until `timeout_ms` passed. False on time-out. */
bool sim_wait_bell(struct sim_state *state, uint32_t seen, uint32_t timeout_ms);

#endif
