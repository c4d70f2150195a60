/* SPDX-License-Identifier: Apache-2.0 */
#define _GNU_SOURCE /* fallocate */

#include "region/region.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "account/ledger.h"
#include "cancel.h"
#include "limit/control.h"

#ifndef F_OFD_SETLK /* Linux 3.15; older headers lack the names */
#define F_OFD_GETLK 36
#define F_OFD_SETLK 37
#endif

#define REPAIR_TRIES 64 /* each finds the counters unchanging unless a process is within a few nanoseconds of an allocation */
#define MILLISECOND_WAITS 1000

/* ---- geometry -------------------------------------------------------------------------------------------------- */

static bool is_placed(uint64_t offset, uint64_t stride, uint64_t least_offset, size_t least_stride)
{
	return offset >= least_offset && stride >= least_stride && (offset | stride) % 64 == 0;
}

/* Do the tables lie behind each other within the file? The rules are in layout.h. */
static bool tables_fit(const struct aq_region_header *header, size_t bytes)
{
	uint64_t devices_end = header->device_offset + (uint64_t)header->device_stride * header->device_count;
	uint64_t slots_end = header->slot_offset + (uint64_t)header->slot_stride * header->slot_count;
	uint64_t end = slots_end;

	if (header->virtual_offset) {
		if (!is_placed(header->virtual_offset, header->virtual_stride, slots_end, sizeof(struct aq_virtual_row)))
			return false;
		end = header->virtual_offset + (uint64_t)header->virtual_stride * header->slot_count;
	}
	return header->header_bytes >= sizeof(*header) && header->device_count >= AQ_MAX_DEVICES && header->slot_count > 0 &&
	       header->slot_count <= AQ_SLOT_COUNT_MAX &&
	       is_placed(header->device_offset, header->device_stride, header->header_bytes, sizeof(struct aq_region_device)) &&
	       is_placed(header->slot_offset, header->slot_stride, devices_end, sizeof(struct aq_region_slot)) && end <= bytes;
}

static int adopt_geometry(struct aq_region *region, const char *path, struct aq_fault *fault)
{
	struct aq_region_header header;

	/* Copied once: what is in the file may change under us, this may not. */
	memcpy(&header, region->base, sizeof(header));
	if (header.magic != AQ_REGION_MAGIC)
		return aq_fault(fault, "%s is not a usage region: magic %#llx, expected %#llx", path, (unsigned long long)header.magic,
				AQ_REGION_MAGIC);
	if (header.abi_major != AQ_ABI_MAJOR)
		return aq_fault(fault, "the usage region %s has ABI version %u, expected %u", path, header.abi_major, AQ_ABI_MAJOR);
	if (!tables_fit(&header, region->bytes))
		return aq_fault(fault, "the usage region %s is truncated or damaged: its tables do not fit its %zu bytes", path,
				region->bytes);
	region->device_offset = header.device_offset;
	region->device_stride = header.device_stride;
	region->slot_offset = header.slot_offset;
	region->slot_stride = header.slot_stride;
	region->slot_count = header.slot_count;
	region->virtual_offset = header.virtual_offset;
	region->virtual_stride = header.virtual_stride;
	return 0;
}

struct aq_region_slot *aq_region_slot(const struct aq_region *region, uint32_t index)
{
	return (struct aq_region_slot *)(void *)(region->base + region->slot_offset + (size_t)index * region->slot_stride);
}

struct aq_region_device *aq_region_line(const struct aq_region *region, uint32_t device)
{
	return (struct aq_region_device *)(void *)(region->base + region->device_offset + (size_t)device * region->device_stride);
}

struct aq_slot_device *aq_region_mine(const struct aq_region *region, uint32_t device)
{
	return &aq_region_slot(region, (uint32_t)region->slot_index)->device[device];
}

struct aq_virtual_device *aq_region_virtual(const struct aq_region *region, uint32_t index, uint32_t device)
{
	if (!region->virtual_offset)
		return NULL;
	unsigned char *row = region->base + region->virtual_offset + (size_t)index * region->virtual_stride;
	return &((struct aq_virtual_row *)(void *)row)->device[device];
}

/* Ask for the pages before they are touched: on a full disk a first touch would end the program with SIGBUS. */
static bool has_room(int fd, size_t bytes)
{
	int failed;

	do
		failed = fallocate(fd, FALLOC_FL_KEEP_SIZE, 0, (off_t)bytes);
	while (failed && errno == EINTR);
	/* a file system that cannot report this is assumed to have room */
	return !failed || (errno != ENOSPC && errno != EDQUOT && errno != ENOMEM);
}

int aq_region_map(struct aq_region *region, const char *path, enum aq_region_access access, struct aq_fault *fault)
{
	bool write = access == AQ_REGION_WRITE;

	memset(region, 0, sizeof(*region));
	region->slot_index = -1;
	pthread_mutex_init(&region->reaping, NULL);
	region->lock_fd = open(path, (write ? O_RDWR : O_RDONLY) | O_CLOEXEC);
	if (region->lock_fd < 0)
		return aq_fault(fault, "cannot open the usage region %s: %s", path, strerror(errno));
	off_t bytes = lseek(region->lock_fd, 0, SEEK_END); /* fstat needs glibc 2.33 */
	if (bytes < (off_t)sizeof(struct aq_region_header))
		return aq_fault(fault, "the usage region %s is truncated: %lld bytes, expected %zu", path, (long long)bytes,
				AQ_REGION_BYTES);
	if (bytes > (off_t)AQ_REGION_BYTES_MAX)
		return aq_fault(fault, "the usage region %s is damaged: %lld bytes, expected at most %u", path, (long long)bytes,
				AQ_REGION_BYTES_MAX);
	region->bytes = (size_t)bytes;
	/* Mapped through another description than the one that locks: a mapping survives in forked children and would keep the lock alive.
	 * A reader locks nothing. It also closes nothing, because that would release the naming lock of its process. */
	int fd = write ? open(path, O_RDWR | O_CLOEXEC) : region->lock_fd;
	if (fd < 0)
		return aq_fault(fault, "cannot open the usage region %s: %s", path, strerror(errno));
	if (write && !has_room(fd, region->bytes)) {
		close(fd);
		return aq_fault(fault,
				"no room for the %zu bytes of the usage region %s: the node's disk or the container's memory is full",
				region->bytes, path);
	}
	void *base = mmap(NULL, region->bytes, write ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, fd, 0);
	if (write)
		close(fd);
	if (base == MAP_FAILED)
		return aq_fault(fault, "cannot map the usage region %s: %s", path, strerror(errno));
	region->base = base;
	return adopt_geometry(region, path, fault);
}

void aq_region_unmap(struct aq_region *region)
{
	if (region->base)
		munmap(region->base, region->bytes);
	if (region->lock_fd >= 0)
		close(region->lock_fd);
	region->base = NULL;
	region->lock_fd = -1;
	region->slot_index = -1;
}

void aq_region_forget(struct aq_region *region)
{
	pthread_mutex_init(&region->reaping, NULL);
	aq_region_unmap(region);
}

/* ---- locks ----------------------------------------------------------------------------------------------------- */

static int lock_command(const struct aq_region *region, int command, short type, off_t offset, struct flock *lock)
{
	*lock = (struct flock){ .l_type = type, .l_whence = SEEK_SET, .l_start = offset, .l_len = 1 };
	return fcntl(region->lock_fd, command, lock);
}

static bool try_lock(const struct aq_region *region, off_t offset)
{
	struct flock lock;

	return lock_command(region, F_OFD_SETLK, F_WRLCK, offset, &lock) == 0;
}

static void unlock(const struct aq_region *region, off_t offset)
{
	struct flock lock;

	lock_command(region, F_OFD_SETLK, F_UNLCK, offset, &lock);
}

static off_t slot_lock(const struct aq_region *region, uint32_t index)
{
	return (off_t)region->slot_offset + (off_t)index * region->slot_stride;
}

bool aq_region_is_live(const struct aq_region *region, uint32_t index)
{
	struct flock lock;

	if (atomic_load_explicit(&aq_region_slot(region, index)->state, memory_order_acquire) == AQ_SLOT_FREE)
		return false;
	if ((int)index == region->slot_index)
		return true;
	return lock_command(region, F_OFD_GETLK, F_WRLCK, slot_lock(region, index), &lock) == 0 && lock.l_type != F_UNLCK;
}

static off_t naming_lock(const struct aq_region *region, uint32_t index)
{
	return slot_lock(region, index) + AQ_NAMING_LOCK_OFFSET;
}

uint32_t aq_region_pid(const struct aq_region *region, uint32_t index)
{
	struct flock lock;

	/* Asked as another description would: so the lock of the caller's own process is seen, too. */
	if (lock_command(region, F_OFD_GETLK, F_WRLCK, naming_lock(region, index), &lock) == 0 && lock.l_type != F_UNLCK && lock.l_pid >= 0)
		return (uint32_t)lock.l_pid;
	return atomic_load_explicit(&aq_region_slot(region, index)->pid, memory_order_relaxed);
}

/* ---- reaping: called with the slot's lock held ----------------------------------------------------------------- */

static uint64_t used_by(const _Atomic uint64_t *charged, const _Atomic uint64_t *uncharged)
{
	/* In this order a concurrent charge and uncharge can only make it look larger. */
	uint64_t given_back = atomic_load(uncharged);
	int64_t used = (int64_t)(atomic_load(charged) - given_back);

	return used > 0 ? (uint64_t)used : 0;
}

int64_t aq_region_ended_ago_ns(const struct aq_virtual_device *ledger, int64_t now_ns)
{
	int64_t at = ledger ? atomic_load_explicit(&ledger->ended_at_ns, memory_order_relaxed) : 0;
	int64_t ago = (int64_t)((uint64_t)now_ns - (uint64_t)at);

	return at && ago >= 0 && ago < AQ_CONTROL_KEPT_NS ? ago : -1;
}

uint64_t aq_slot_used_bytes(const struct aq_slot_device *device)
{
	return used_by(&device->charged, &device->uncharged);
}

uint64_t aq_virtual_used_bytes(const struct aq_virtual_device *ledger)
{
	return ledger ? used_by(&ledger->charged, &ledger->uncharged) : 0;
}

/* Bring the four counters to rest at the same value and give the judge what the dead process held. */
static void credit(_Atomic uint64_t *judge, struct aq_counters *dead)
{
	int64_t used = (int64_t)(atomic_load(&dead->charged) - atomic_load(&dead->uncharged));

	if (used < 0) { /* killed while taking back a refused charge: that charge never reached the judge */
		atomic_store(&dead->intended, atomic_load(&dead->uncharged));
		atomic_store(&dead->charged, atomic_load(&dead->uncharged));
	} else {
		atomic_store(&dead->intended, atomic_load(&dead->charged));
		if (used > 0) {
			atomic_fetch_add(&dead->uncharged, (uint64_t)used);
			atomic_fetch_sub(judge, (uint64_t)used);
		}
	}
	atomic_store(&dead->settled, atomic_load(&dead->uncharged));
}

static void clear_statistics(const struct aq_region *region, uint32_t index, uint32_t position)
{
	struct aq_slot_device *device = &aq_region_slot(region, index)->device[position];

	atomic_store_explicit(&device->context_bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&device->managed_bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&device->pool_bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&device->array_bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&device->refusals, 0, memory_order_relaxed);
	atomic_store_explicit(&device->last_refused_bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&device->launches, 0, memory_order_relaxed);
	atomic_store_explicit(&device->busy_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&device->throttled_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&device->contexts, 0, memory_order_relaxed);
	atomic_store_explicit(&device->module_bytes, 0, memory_order_relaxed);
	atomic_store_explicit(&device->waiting, 0, memory_order_relaxed);
	atomic_store_explicit(&device->unsettled_since_ns, 0, memory_order_relaxed);
}

static void clear_payments(struct aq_virtual_device *ledger)
{
	if (!ledger)
		return;
	atomic_store_explicit(&ledger->compared.seen_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&ledger->compared.pending_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&ledger->compared.closed_at_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&ledger->ended_at_ns, 0, memory_order_relaxed);
}

static int64_t now_ns(void)
{
	struct timespec now;

	clock_gettime(CLOCK_MONOTONIC, &now);
	return now.tv_sec * 1000000000ll + now.tv_nsec;
}

/* The container pays for the launch that its dead process did not settle. Returns all that the process paid. */
static int64_t settle_compute(struct aq_region_device *line, const struct aq_slot_device *dead)
{
	int64_t since = atomic_load_explicit(&dead->unsettled_since_ns, memory_order_relaxed);
	int64_t owed = since ? aq_settle_orphan(since, now_ns()) : 0;

	if (owed)
		aq_bucket_settle(&line->compute, owed);
	return (int64_t)(atomic_load_explicit(&dead->busy_ns, memory_order_relaxed) + (uint64_t)owed);
}

/* What a dead process paid stays in its slot, for the driver's figures that are still to come. False if there is nothing to compare. */
static bool leave_payments(struct aq_virtual_device *ledger, int64_t paid_ns)
{
	if (!ledger || !aq_control_end(&ledger->compared, paid_ns)) {
		clear_payments(ledger);
		return false;
	}
	atomic_store_explicit(&ledger->ended_at_ns, now_ns(), memory_order_relaxed);
	return true;
}

/* May the driver's figures still name the last owner of a free slot? */
static bool has_payments(const struct aq_region *region, uint32_t index)
{
	int64_t now = now_ns();

	for (uint32_t device = 0; device < AQ_MAX_DEVICES; device++)
		if (aq_region_ended_ago_ns(aq_region_virtual(region, index, device), now) >= 0)
			return true;
	return false;
}

static void bury(const struct aq_region *region, uint32_t index)
{
	struct aq_region_header *header = (struct aq_region_header *)(void *)region->base;
	struct aq_region_slot *slot = aq_region_slot(region, index);
	bool is_kept = false;

	for (uint32_t device = 0; device < AQ_MAX_DEVICES; device++) {
		struct aq_region_device *line = aq_region_line(region, device);
		struct aq_virtual_device *ledger = aq_region_virtual(region, index, device);

		credit(&line->used_bytes, aq_counters_of_device(&slot->device[device]));
		if (ledger)
			credit(&line->virtual_bytes, aq_counters_of_virtual(ledger));
		int64_t paid_ns = settle_compute(line, &slot->device[device]);
		clear_statistics(region, index, device);
		is_kept |= leave_payments(ledger, paid_ns);
	}
	if (!is_kept) {
		atomic_store(&slot->pid, 0);
		atomic_store(&slot->host_pid, 0);
	}
	atomic_store(&slot->start_ticks, 0);
	atomic_store(&slot->state, AQ_SLOT_FREE);
	atomic_fetch_add(&header->reaped_slots, 1);
}

static unsigned reap_dead(const struct aq_region *region)
{
	unsigned reaped = 0;

	for (uint32_t i = 0; i < region->slot_count; i++) {
		struct aq_region_slot *slot = aq_region_slot(region, i);

		if ((int)i == region->slot_index || atomic_load(&slot->state) == AQ_SLOT_FREE)
			continue;
		if (!try_lock(region, slot_lock(region, i)))
			continue;
		if (atomic_load(&slot->state) != AQ_SLOT_FREE) {
			aq_log_debug("process %u has ended: its memory is uncharged", atomic_load(&slot->pid));
			bury(region, i);
			reaped++;
		}
		unlock(region, slot_lock(region, i));
	}
	return reaped;
}

/* ---- repairing: called with the repair lock held --------------------------------------------------------------- */

/* One ledger of one device: its judge, and how to find a slot's counters. */
struct ledger {
	_Atomic uint64_t *judge;
	uint32_t device;
	bool is_virtual;
};

static struct aq_counters *counters_in(const struct aq_region *region, const struct ledger *ledger, uint32_t index)
{
	return ledger->is_virtual ? aq_counters_of_virtual(aq_region_virtual(region, index, ledger->device))
				  : aq_counters_of_device(&aq_region_slot(region, index)->device[ledger->device]);
}

/* The leak of one ledger, by the argument in layout.h. False when the counters were changing. */
static bool measure_leak(const struct aq_region *region, const struct ledger *ledger, int64_t *leak)
{
	uint64_t charged = 0, settled = 0, intended = 0, uncharged = 0;

	for (uint32_t i = 0; i < region->slot_count; i++) {
		charged += atomic_load(&counters_in(region, ledger, i)->charged);
		settled += atomic_load(&counters_in(region, ledger, i)->settled);
	}
	uint64_t judge = atomic_load(ledger->judge);
	for (uint32_t i = 0; i < region->slot_count; i++) {
		intended += atomic_load(&counters_in(region, ledger, i)->intended);
		uncharged += atomic_load(&counters_in(region, ledger, i)->uncharged);
	}
	*leak = (int64_t)(judge - (charged - uncharged));
	/* Each slot's late counter is at least its early one, so equal sums mean equal counters. */
	return intended == charged && uncharged == settled;
}

static bool repair_ledger(const struct aq_region *region, const struct ledger *ledger)
{
	struct aq_region_header *header = (struct aq_region_header *)(void *)region->base;
	int64_t leak = 0;

	for (unsigned i = 0; i < REPAIR_TRIES; i++) {
		if (measure_leak(region, ledger, &leak)) {
			if (leak == 0)
				return false;
			/* Negative when a tenant scribbled on its region: then the judge is raised to the truth. */
			atomic_fetch_sub(ledger->judge, (uint64_t)leak);
			atomic_fetch_add(&header->repaired_bytes, (uint64_t)leak);
			aq_log_debug("device %u: %lld bytes left by killed processes are uncharged", ledger->device, (long long)leak);
			return leak > 0;
		}
		sched_yield();
	}
	return false;
}

static bool repair(const struct aq_region *region)
{
	bool repaired = false;

	if (!try_lock(region, AQ_REPAIR_LOCK_OFFSET))
		return true; /* another process is repairing: what it finds is for all */
	for (uint32_t device = 0; device < AQ_MAX_DEVICES; device++) {
		struct aq_region_device *line = aq_region_line(region, device);

		repaired |= repair_ledger(region, &(struct ledger){ &line->used_bytes, device, false });
		if (aq_region_virtual(region, 0, device) && atomic_load(&line->virtual_bytes)) /* few containers oversubscribe */
			repaired |= repair_ledger(region, &(struct ledger){ &line->virtual_bytes, device, true });
	}
	unlock(region, AQ_REPAIR_LOCK_OFFSET);
	return repaired;
}

void aq_region_reap(struct aq_region *region)
{
	pthread_mutex_lock(&region->reaping);
	if (region->base)
		reap_dead(region);
	pthread_mutex_unlock(&region->reaping);
}

bool aq_region_reclaim(struct aq_region *region)
{
	pthread_mutex_lock(&region->reaping);
	bool reaped = region->base && reap_dead(region) > 0;
	bool repaired = region->base && repair(region);
	pthread_mutex_unlock(&region->reaping);
	return reaped || repaired;
}

/* ---- the process's own slot ------------------------------------------------------------------------------------ */

/* Field 22 of /proc/self/stat; the name in field 2 may hold spaces and parentheses, so count from the last ')'. */
static uint64_t own_start_ticks(void)
{
	char text[512];
	int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
	ssize_t length = fd < 0 ? -1 : read(fd, text, sizeof(text) - 1);
	unsigned long long ticks = 0;

	if (fd >= 0)
		close(fd);
	if (length <= 0)
		return 0;
	text[length] = '\0';
	const char *cursor = strrchr(text, ')');
	for (int field = 3; cursor && field <= 22; field++) {
		cursor = strchr(cursor + 1, ' ');
		if (cursor && field == 22 && sscanf(cursor, "%llu", &ticks) != 1)
			ticks = 0;
	}
	return ticks;
}

/* 0 where /proc is not mounted. */
static uint64_t own_pid_namespace(void)
{
	char text[64];
	ssize_t length = readlink("/proc/self/ns/pid", text, sizeof(text) - 1);
	unsigned long long inode = 0;

	text[length > 0 ? length : 0] = '\0';
	return sscanf(text, "pid:[%llu]", &inode) == 1 ? inode : 0;
}

/* `*refused`: why a free slot's lock cannot be had, where no other process holds it. `any`: also one with payments of its last owner. */
static bool take_free_slot(struct aq_region *region, bool any, int *refused)
{
	struct flock lock;

	for (uint32_t i = 0; i < region->slot_count; i++) {
		struct aq_region_slot *slot = aq_region_slot(region, i);

		if (atomic_load(&slot->state) != AQ_SLOT_FREE || (!any && has_payments(region, i)))
			continue;
		if (!try_lock(region, slot_lock(region, i))) {
			*refused = errno == EAGAIN || errno == EACCES ? *refused : errno;
			continue;
		}
		if (atomic_load(&slot->state) == AQ_SLOT_FREE) {
			for (uint32_t device = 0; device < AQ_MAX_DEVICES; device++) {
				/* an older version buried its owner and did not know them all */
				clear_statistics(region, i, device);
				clear_payments(aq_region_virtual(region, i, device));
			}
			atomic_store(&slot->host_pid, 0);
			atomic_store(&slot->start_ticks, own_start_ticks());
			atomic_store(&slot->pid_namespace, own_pid_namespace());
			atomic_store(&slot->pid, (uint32_t)getpid());
			/* if it cannot be had, the slot's pid has to do */
			lock_command(region, F_SETLK, F_WRLCK, naming_lock(region, i), &lock);
			atomic_store(&slot->state, AQ_SLOT_LIVE);
			region->slot_index = (int)i;
			return true;
		}
		unlock(region, slot_lock(region, i));
	}
	return false;
}

int aq_region_take_slot(struct aq_region *region, struct aq_fault *fault)
{
	struct flock lock;

	if (lock_command(region, F_OFD_GETLK, F_WRLCK, AQ_REPAIR_LOCK_OFFSET, &lock))
		return aq_fault(fault, "this kernel or file system does not support open-file-description locks (%s)", strerror(errno));
	aq_region_reclaim(region);
	for (unsigned i = 0; i < MILLISECOND_WAITS; i++) {
		int refused = 0;

		if (take_free_slot(region, false, &refused) || take_free_slot(region, true, &refused))
			return 0;
		if (refused)
			return aq_fault(
				fault,
				"a lock on the usage region is refused (%s): the container's seccomp profile, or what filters its system "
				"calls, has to allow fcntl with F_OFD_SETLK",
				strerror(refused));
		/* Every slot taken and alive, or another newcomer is looking at the free one at this instant. */
		if (i % 16 == 15)
			aq_region_reclaim(region);
		aq_sleep(1000000);
	}
	return aq_fault(fault,
			"all %u slots of the usage region belong to running processes: no more of a container can use CUDA at a time",
			region->slot_count);
}
