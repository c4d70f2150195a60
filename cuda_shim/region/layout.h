/* SPDX-License-Identifier: Apache-2.0 */
/* The shared ABI of one container: its limits and its usage region.
 *
 * Two files, both created by the node agent, both per container:
 *
 *   limits   read-only in the container, root-owned, written in place by the agent (the inode never changes, so every
 *            process that mapped it sees an update). One page. What the container may use.
 *   region   writable in the container, sized by the agent, written by the container's own processes. What it uses.
 *            A tenant that scribbles on it harms only itself; the agent reads it with pread(2), never through a mapping
 *            (a tenant may truncate the file), and treats every word as untrusted.
 *
 * The mirror in Python is agent/core/region_layout.py; tests/unit/agent/core/test_region_layout.py compiles this header and compares every
 * size and offset.
 *
 * Compatibility. A reader accepts its own major version only. A newer minor may append devices' fields, slots' fields and header fields:
 * readers step by the strides the header states, which are never smaller than the structs here, and ignore what they do not know. Reserved
 * fields are zero. Old offsets never move. Words are little-endian, as on every host of CUDA. The tables of a region follow its header in
 * the order devices, slots, virtual ledgers, at multiples of 64, without overlap, and lie within the file; both readers refuse any other
 * region by the same rules (tests/fakes/regions.py has the table of odd ones that both are tried on).
 *
 * Updating limits. The writer stores an odd generation, rewrites the page (including versions, header size and checksum: the previous
 * writer may have had another minor version), then stores the next even generation (seqlock). A reader copies the page. It uses the copy
 * when the generation was even, the same before and after, and the checksum matches; otherwise it keeps its old copy and looks again at its
 * next call. The checksum makes the copy safe even where the writer's stores are not ordered, and reveals a damaged file. Devices are
 * appended, never reordered or removed while the container runs.
 *
 * Counting memory, per device. The judge is one word, `used_bytes` of the device's line; each slot (process) keeps four counters that only
 * grow:
 *
 *     charge n bytes    intended += n;   used_bytes += n unless that would pass the limit;   charged += n
 *     uncharge n        uncharged += n;  used_bytes -= n;                                    settled += n
 *     charge refused    intended += n;   used_bytes untouched;   uncharged += n;  charged += n;  settled += n
 *
 * A slot uses `charged - uncharged` bytes. The order is the contract:
 *
 *   (1) used_bytes >= sum over slots of (charged - uncharged), at every instant and after a kill at any instant: the line grows before
 *       the slot and shrinks after it. So a grant, which compares with the line, can never pass the limit.
 *   (2) What a killed process leaves between its steps is an excess of the line (a leak): it under-uses, never over-uses.
 *   (3) The leak is a constant: no living process will ever subtract it.
 *
 * Reaping a dead slot (its lock acquired, see below): intended := charged; n := charged - uncharged; then uncharge n. A reaper that is
 * killed in between leaves, again, only a leak. Repairing the leak (repair lock held): read `charged` and `settled` of all slots, then
 * used_bytes, then `intended` and `uncharged` of all slots. The counters only grow, and charged <= intended, settled <= uncharged. So if
 * the late reading equals the early one, no operation was in progress or began in between. Then used_bytes - sum(charged - uncharged)
 * was exactly the leak, and by (3) it may be subtracted at any later time. Otherwise the line stays as it is and the next attempt looks
 * again. No process ever waits for another.
 *
 * Oversubscription (burst_bytes above memory_bytes). Memory that may leave the device is counted in a second ledger of the same protocol:
 * `virtual_bytes` of the line, and four counters per slot and device in a table of their own (struct aq_virtual_row; a region of minor
 * version 0 has no such table, and its container cannot oversubscribe). The first ledger alone keeps device memory within memory_bytes.
 * Both together stay within burst_bytes: a process that charges one of them checks the sum after its own add, and takes the charge back
 * when it exceeds the ceiling. Of two processes that add at once at least one sees the other, so together they cannot exceed it.
 *
 * Liveness. A process owns slot i while it holds an open-file-description write lock (fcntl F_OFD_SETLK) on the byte at the slot's offset
 * in the region file. The kernel drops the lock at any kind of death, across pid namespaces and pid reuse. The lock's file description is
 * never mapped (a mapping inherited by fork would keep it), is close-on-exec, and is closed in forked children. A slot is dead when its
 * state is not AQ_SLOT_FREE and its lock can be acquired. To probe without acquiring use F_OFD_GETLK. Byte 0 of the file is the repair
 * lock. Slots are never moved.
 *
 * Names. A container may have pid namespaces inside (`unshare --pid`), where a slot's `pid` is valid only in its owner's namespace. So the
 * owner also holds a traditional write lock (fcntl F_SETLK) on the byte after its liveness byte. To a process that queries that lock the
 * kernel names the holder in the querying process's namespace, and by 0 where it is not visible. Such a lock is lost as soon as its process
 * closes any descriptor of the file. Then, and for shims that do not take it, only `pid` is left.
 *
 * Payments of ended processes. A reaper leaves in the free slot what its dead owner paid, with its pids: `compared` of the virtual row, and
 * `ended_at_ns`. The driver's figures may name the process for some seconds, and the process that takes in a figure settles it (limit/control.h). A
 * newcomer takes such a slot only when there is no other.
 *
 * Who reaps. The container's processes do: when one attaches, before one refuses memory, and when one queries free memory. The agent does
 * not write counters (it has no atomic adds, and need not be trusted with them): it probes with F_OFD_GETLK, leaves dead slots out of its
 * sums, and stores one word, `host_pid`, into live slots.
 */
#ifndef AQ_REGION_LAYOUT_H
#define AQ_REGION_LAYOUT_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#include "limit/bucket.h"
#include "limit/settle.h"

#define AQ_LIMITS_MAGIC 0x314d494c51414c41ull /* "ALAQLIM1" */
#define AQ_REGION_MAGIC 0x314e474551414c41ull /* "ALAQEGN1" */
#define AQ_ABI_MAJOR 1
/* 1: the virtual ledger, module_bytes; 2: the regime of the compute bucket, turns_owner; 3: waiting; 4: settlement, unsettled_since_ns;
 * 5: compared; 6: ended_at_ns, ended_named_ns, pid_namespace */
#define AQ_ABI_MINOR 6

#define AQ_MAX_DEVICES 16
#define AQ_SLOT_COUNT 256
#define AQ_UUID_BYTES 96
#define AQ_MEMORY_UNLIMITED UINT64_MAX

/* ---- limits ---------------------------------------------------------------------------------------------------- */

enum aq_policy_flags {
	AQ_POLICY_FAIL_OPEN = 1u << 0, /* when the shim cannot work, let the program run unlimited instead of refusing cuInit */
};

enum aq_log_level {
	AQ_LOG_ERROR = 0, /* only why the shim cannot work, once */
	AQ_LOG_WARN = 1,  /* and refusals of memory */
	AQ_LOG_DEBUG = 2, /* and attach, reap, repair */
};

struct aq_limits_header {
	uint64_t magic;
	uint16_t abi_major;
	uint16_t abi_minor;
	uint32_t header_bytes;        /* offset of the first device */
	_Atomic uint64_t generation;  /* odd while the agent writes; starts at 2 */
	_Atomic uint32_t checksum;    /* CRC-32 (IEEE) of the bytes from device_stride to the end of the last device */
	uint32_t reserved0;
	uint32_t device_stride;       /* the checksum starts here */
	uint32_t device_count;
	uint32_t policy_flags;        /* enum aq_policy_flags */
	uint32_t log_level;           /* enum aq_log_level */
	uint8_t reserved[208];
};

struct aq_limits_device {
	char uuid[AQ_UUID_BYTES];     /* "GPU-…" or "MIG-…" as NVML spells it, NUL-terminated */
	uint64_t memory_bytes;        /* what the container may hold, contexts included; AQ_MEMORY_UNLIMITED */
	uint64_t burst_bytes;         /* ceiling of device and virtual memory together; not above memory_bytes = no oversubscription */
	uint64_t context_bytes;       /* what one context costs here, as the agent measured it; 0 = not known, the shim measures */
	uint64_t overhead_bytes;      /* what the driver uses for the container beyond all the shim counts; taken off the limit */
	uint32_t sm_percent;          /* ceiling of SM time, 1..99; 0 and 100 = no ceiling */
	uint32_t sm_weight;           /* share when contended; 0 = by sm_percent */
	int32_t priority;             /* > 0: high, < 0: low; needs priority_line */
	uint32_t pause;               /* non-zero: submit no new work until it is zero again */
	uint32_t flags;               /* none defined */
	uint32_t priority_line; /* the device's line in the node's pages, from 1; 0 = no line. See limit/priority.h and limit/turns.h */
	uint64_t reserved[11];
};

/* ---- region ---------------------------------------------------------------------------------------------------- */

enum aq_slot_state {
	AQ_SLOT_FREE = 0,
	AQ_SLOT_LIVE = 1, /* owned, if its lock is held; dead otherwise */
};

struct aq_region_header {
	uint64_t magic;
	uint16_t abi_major;
	uint16_t abi_minor;
	uint32_t header_bytes;
	uint32_t device_offset;
	uint32_t device_stride;
	uint32_t device_count; /* always AQ_MAX_DEVICES: entry k belongs to device k of limits */
	uint32_t slot_offset;
	uint32_t slot_stride;
	uint32_t slot_count;
	uint64_t region_bytes;
	_Atomic uint64_t reaped_slots; /* dead slots reaped so far */
	_Atomic uint64_t repaired_bytes; /* leaks found and subtracted so far */
	uint32_t virtual_offset; /* of the virtual ledgers, one row per slot; 0 = no such table */
	uint32_t virtual_stride;
	_Atomic uint64_t turns_owner; /* the identity of the container on the page of time slots, limit/turns.h; 0 = not yet */
	uint8_t reserved[176];
};

struct aq_region_device {
	_Alignas(64) _Atomic uint64_t used_bytes; /* the judge of every grant */
	_Atomic uint64_t context_bytes; /* what one context was measured to cost here; 0 = not measured */
	_Atomic uint64_t virtual_bytes; /* the judge of the virtual ledger: memory that may leave the device */
	struct aq_settlement settlement; /* of the bucket with the driver's figures; limit/control.h */
	struct aq_bucket compute; /* a cache line of its own; limit/bucket.h */
};

struct aq_slot_device {
	_Alignas(64) _Atomic uint64_t intended; /* the four counters of a charge, in bytes, modulo 2^64 */
	_Atomic uint64_t charged;
	_Atomic uint64_t uncharged;
	_Atomic uint64_t settled;
	_Atomic uint64_t context_bytes; /* of the bytes in use: contexts */
	_Atomic uint64_t managed_bytes; /* … managed memory */
	_Atomic uint64_t pool_bytes; /* … memory pools and graph memory */
	_Atomic uint64_t array_bytes; /* … arrays and mipmapped arrays */
	_Atomic uint64_t refusals; /* allocations refused */
	_Atomic uint64_t last_refused_bytes;
	/* kernels and graphs submitted; behind by some of each thread's while they are not paced (interpose/unpaced.h) */
	_Atomic uint64_t launches;
	_Atomic uint64_t busy_ns; /* GPU time paid for; not counted while launches are free */
	_Atomic uint64_t throttled_ns; /* time spent waiting for the right to launch */
	_Atomic uint32_t contexts; /* contexts alive on the device */
	_Atomic uint32_t waiting; /* threads that wait at this moment for the right to launch */
	_Atomic uint64_t module_bytes; /* of the bytes in use: code and variables of modules, as measured */
	_Atomic int64_t
		unsettled_since_ns; /* CLOCK_MONOTONIC up to which the oldest unsettled unknown launch is paid; 0 = all are settled */
};

/* The virtual ledger of one slot and device, and a part of it for which its struct aq_slot_device has no room. */
struct aq_virtual_device {
	_Alignas(64) _Atomic uint64_t intended;
	_Atomic uint64_t charged;
	_Atomic uint64_t uncharged;
	_Atomic uint64_t settled;
	struct aq_compared compared; /* busy_ns with the driver's figures; limit/control.h */
	/* CLOCK_MONOTONIC when the slot's last owner was found to have ended. The slot is free, but keeps `compared` and the pids until its
	 * payments are settled. 0 = there is nothing to settle, or the slot is not free */
	_Atomic int64_t ended_at_ns;
};

/* The virtual ledgers of one slot. */
struct aq_virtual_row {
	struct aq_virtual_device device[AQ_MAX_DEVICES];
};

struct aq_region_slot {
	_Alignas(64) _Atomic uint32_t state; /* enum aq_slot_state */
	_Atomic uint32_t pid; /* as it sees itself; see Names above */
	_Atomic uint32_t host_pid; /* as the agent sees it; written by the agent, 0 = not known yet */
	uint32_t reserved0;
	_Atomic uint64_t start_ticks; /* field 22 of /proc/<pid>/stat, distinguishes reused pids */
	_Atomic uint64_t pid_namespace; /* inode number of the namespace that `pid` is of; 0 = not known */
	uint64_t reserved[12];
	struct aq_slot_device device[AQ_MAX_DEVICES];
};

#define AQ_REGION_DEVICE_OFFSET 256u
#define AQ_REGION_SLOT_OFFSET 4096u
#define AQ_LIMITS_BYTES (sizeof(struct aq_limits_header) + AQ_MAX_DEVICES * sizeof(struct aq_limits_device))
#define AQ_REGION_VIRTUAL_OFFSET (AQ_REGION_SLOT_OFFSET + AQ_SLOT_COUNT * sizeof(struct aq_region_slot))
#define AQ_REGION_BYTES (AQ_REGION_VIRTUAL_OFFSET + AQ_SLOT_COUNT * sizeof(struct aq_virtual_row))
#define AQ_REPAIR_LOCK_OFFSET 0u
#define AQ_NAMING_LOCK_OFFSET 1u /* from the slot's own lock */

/* What no version will pass: larger is damage. */
#define AQ_LIMITS_BYTES_MAX (1u << 20)
#define AQ_REGION_BYTES_MAX (1u << 25)
#define AQ_SLOT_COUNT_MAX 4096u

/* ABI v1. */
_Static_assert(sizeof(struct aq_limits_header) == 256, "limits ABI v1");
_Static_assert(offsetof(struct aq_limits_header, generation) == 16, "limits ABI v1");
_Static_assert(offsetof(struct aq_limits_header, checksum) == 24, "limits ABI v1");
_Static_assert(offsetof(struct aq_limits_header, device_stride) == 32, "limits ABI v1");
_Static_assert(sizeof(struct aq_limits_device) == 240, "limits ABI v1");
_Static_assert(offsetof(struct aq_limits_device, memory_bytes) == 96, "limits ABI v1");
_Static_assert(offsetof(struct aq_limits_device, sm_percent) == 128, "limits ABI v1");
_Static_assert(AQ_LIMITS_BYTES == 4096, "limits ABI v1: one page");
_Static_assert(sizeof(struct aq_region_header) == 256, "region ABI v1");
_Static_assert(offsetof(struct aq_region_header, slot_offset) == 28, "region ABI v1");
_Static_assert(offsetof(struct aq_region_header, region_bytes) == 40, "region ABI v1");
_Static_assert(sizeof(struct aq_region_device) == 128, "region ABI v1");
_Static_assert(AQ_REGION_DEVICE_OFFSET + AQ_MAX_DEVICES * sizeof(struct aq_region_device) <= AQ_REGION_SLOT_OFFSET, "region ABI v1");
_Static_assert(sizeof(struct aq_slot_device) == 128, "region ABI v1");
_Static_assert(offsetof(struct aq_slot_device, refusals) == 64, "region ABI v1");
_Static_assert(sizeof(struct aq_region_slot) == 2176, "region ABI v1");
_Static_assert(offsetof(struct aq_region_slot, start_ticks) == 16, "region ABI v1");
_Static_assert(offsetof(struct aq_region_slot, device) == 128, "region ABI v1");
_Static_assert(offsetof(struct aq_slot_device, waiting) == 108, "region ABI v1.3");
_Static_assert(offsetof(struct aq_slot_device, module_bytes) == 112, "region ABI v1.1");
_Static_assert(offsetof(struct aq_slot_device, unsettled_since_ns) == 120, "region ABI v1.4");
_Static_assert(offsetof(struct aq_region_device, virtual_bytes) == 16, "region ABI v1.1");
_Static_assert(offsetof(struct aq_region_device, settlement) == 24, "region ABI v1.4");
_Static_assert(offsetof(struct aq_region_device, compute) == 64, "region ABI v1");
_Static_assert(offsetof(struct aq_region_header, virtual_offset) == 64, "region ABI v1.1");
_Static_assert(offsetof(struct aq_region_header, turns_owner) == 72, "region ABI v1.2");
_Static_assert(sizeof(struct aq_virtual_device) == 64, "region ABI v1.1");
_Static_assert(offsetof(struct aq_virtual_device, compared) == 32, "region ABI v1.5");
_Static_assert(offsetof(struct aq_virtual_device, ended_at_ns) == 56, "region ABI v1.6");
_Static_assert(offsetof(struct aq_region_slot, pid_namespace) == 24, "region ABI v1.6");
_Static_assert(offsetof(struct aq_settlement, ended_named_ns) == 32, "region ABI v1.6");
_Static_assert(sizeof(struct aq_virtual_row) == 1024, "region ABI v1.1");
_Static_assert(AQ_REGION_VIRTUAL_OFFSET == 561152, "region ABI v1.1");
_Static_assert(AQ_REGION_BYTES == 823296, "region ABI v1.1");
_Static_assert(sizeof(_Atomic uint64_t) == 8 && ATOMIC_LLONG_LOCK_FREE == 2, "shared words must be lock-free");

#endif
