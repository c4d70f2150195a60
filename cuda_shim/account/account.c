/* SPDX-License-Identifier: Apache-2.0 */
#include "account/account.h"

#include "account/ledger.h"
#include "limit/memory.h"

struct account {
	struct aq_region_device *line;
	struct aq_slot_device *mine;
	struct aq_virtual_device *mine_virtual; /* NULL: a region without virtual ledger */
};

static struct account accounts[AQ_MAX_DEVICES];
static struct aq_limits *limits;
static const struct aq_region *region;
static bool (*reclaim)(int device);

void aq_account_open(struct aq_limits *new_limits, struct aq_region *new_region, bool (*new_reclaim)(int device))
{
	limits = new_limits;
	region = new_region;
	reclaim = new_reclaim;
	for (uint32_t device = 0; device < AQ_MAX_DEVICES; device++) {
		accounts[device].line = aq_region_line(region, device);
		accounts[device].mine = aq_region_mine(region, device);
		accounts[device].mine_virtual = aq_region_virtual(region, (uint32_t)region->slot_index, device);
	}
}

const struct aq_region *aq_account_region(void)
{
	return region;
}

static inline uint64_t limit_of(int device)
{
	if (__builtin_expect(aq_limits_changed(limits), 0))
		aq_limits_refresh(limits);
	return atomic_load_explicit(&limits->device[device].memory_bytes, memory_order_relaxed);
}

/* Ceiling of device and virtual memory together; 0 = no oversubscription. */
static inline uint64_t burst_of(int device)
{
	return atomic_load_explicit(&limits->device[device].burst_bytes, memory_order_relaxed);
}

static inline void note(const struct account *account, enum aq_kind kind, uint64_t bytes)
{
	static const size_t part[] = {
		[AQ_MANAGED] = offsetof(struct aq_slot_device, managed_bytes),
		[AQ_POOL] = offsetof(struct aq_slot_device, pool_bytes),
		[AQ_ARRAY] = offsetof(struct aq_slot_device, array_bytes),
		[AQ_CONTEXT] = offsetof(struct aq_slot_device, context_bytes),
		[AQ_MODULE] = offsetof(struct aq_slot_device, module_bytes),
	};

	if (kind != AQ_LINEAR)
		atomic_fetch_add_explicit((_Atomic uint64_t *)(void *)((char *)account->mine + part[kind]), bytes, memory_order_relaxed);
}

/* After an add to either ledger: is the sum of both within the ceiling? The add and these loads are sequentially consistent, so of two
 * that add at once at least one sees the other. */
static bool within_burst(const struct account *account, uint64_t burst)
{
	uint64_t used = atomic_load(&account->line->used_bytes), pageable = atomic_load(&account->line->virtual_bytes);

	return used <= burst && pageable <= burst - used;
}

static __attribute__((noinline)) bool charge_virtual(const struct account *account, uint64_t bytes, uint64_t burst)
{
	if (!account->mine_virtual ||
	    !aq_counters_charge(&account->line->virtual_bytes, aq_counters_of_virtual(account->mine_virtual), bytes, burst))
		return false;
	if (within_burst(account, burst))
		return true;
	aq_counters_uncharge(&account->line->virtual_bytes, aq_counters_of_virtual(account->mine_virtual), bytes);
	return false;
}

bool aq_charge_quick(int device, enum aq_kind kind, uint64_t bytes)
{
	if (device < 0)
		return false;
	if (!bytes) /* also when usage exceeds the limit, which may have been lowered: nothing more is charged */
		return true;
	const struct account *account = &accounts[device];
	uint64_t limit = limit_of(device), burst = burst_of(device);
	if (__builtin_expect(kind == AQ_VIRTUAL, 0))
		return charge_virtual(account, bytes, burst);
	if (!aq_ledger_charge(account->line, account->mine, bytes, limit))
		return false;
	if (__builtin_expect(burst != 0, 0) && !within_burst(account, burst)) {
		aq_ledger_uncharge(account->line, account->mine, bytes);
		return false;
	}
	note(account, kind, bytes);
	return true;
}

void aq_refused(int device, uint64_t bytes)
{
	if (device < 0) {
		aq_log_warn("allocation of %llu bytes refused: the device is visible but not granted to this container",
			    (unsigned long long)bytes);
		return;
	}
	const struct account *account = &accounts[device];
	atomic_fetch_add_explicit(&account->mine->refusals, 1, memory_order_relaxed);
	atomic_store_explicit(&account->mine->last_refused_bytes, bytes, memory_order_relaxed);
	aq_log_warn("allocation of %llu bytes on %s refused: %llu of %llu bytes in use, and %llu bytes of managed memory",
		    (unsigned long long)bytes, limits->device[device].uuid_text,
		    (unsigned long long)atomic_load_explicit(&account->line->used_bytes, memory_order_relaxed),
		    (unsigned long long)limit_of(device),
		    (unsigned long long)atomic_load_explicit(&account->line->virtual_bytes, memory_order_relaxed));
}

static __attribute__((noinline)) bool charge_after_reclaim(int device, enum aq_kind kind, uint64_t bytes)
{
	if (device >= 0 && reclaim(device) && aq_charge_quick(device, kind, bytes))
		return true;
	aq_refused(device, bytes);
	return false;
}

bool aq_charge(int device, enum aq_kind kind, uint64_t bytes)
{
	return __builtin_expect(aq_charge_quick(device, kind, bytes), 1) || charge_after_reclaim(device, kind, bytes);
}

void aq_charge_taken(int device, enum aq_kind kind, uint64_t bytes)
{
	if (device < 0)
		return;
	aq_ledger_charge(accounts[device].line, accounts[device].mine, bytes, UINT64_MAX);
	note(&accounts[device], kind, bytes);
}

void aq_uncharge(int device, enum aq_kind kind, uint64_t bytes)
{
	if (device < 0)
		return;
	const struct account *account = &accounts[device];
	if (__builtin_expect(kind == AQ_VIRTUAL, 0)) { /* charged, so the ledger is there */
		aq_counters_uncharge(&account->line->virtual_bytes, aq_counters_of_virtual(account->mine_virtual), bytes);
		return;
	}
	note(account, kind, -bytes);
	aq_ledger_uncharge(account->line, account->mine, bytes);
}

bool aq_account_oversubscribed(int device)
{
	return device >= 0 && burst_of(device) && accounts[device].mine_virtual;
}

bool aq_account_full(int device)
{
	return device >= 0 && atomic_load_explicit(&accounts[device].line->used_bytes, memory_order_relaxed) >= limit_of(device);
}

bool aq_account_over(int device)
{
	return device >= 0 && atomic_load_explicit(&accounts[device].line->used_bytes, memory_order_relaxed) > limit_of(device);
}

uint64_t aq_account_own_bytes(int device)
{
	if (device < 0)
		return 0;
	return aq_slot_used_bytes(accounts[device].mine) + aq_virtual_used_bytes(accounts[device].mine_virtual);
}

uint64_t aq_account_container_bytes(int device)
{
	if (device < 0)
		return 0;
	return atomic_load_explicit(&accounts[device].line->used_bytes, memory_order_relaxed) +
	       atomic_load_explicit(&accounts[device].line->virtual_bytes, memory_order_relaxed);
}

struct aq_view aq_account_view(int device, uint64_t physical_total, uint64_t physical_free)
{
	if (device < 0)
		return (struct aq_view){ .total_bytes = physical_total, .used_bytes = physical_total };
	uint64_t limit = limit_of(device);
	uint64_t overhead = atomic_load_explicit(&limits->device[device].overhead_bytes, memory_order_relaxed);
	uint64_t used = atomic_load_explicit(&accounts[device].line->used_bytes, memory_order_relaxed);
	if (aq_account_oversubscribed(device)) {
		used = aq_account_container_bytes(device);
		limit = burst_of(device);
		physical_total = physical_free = UINT64_MAX; /* what does not fit the device lies in host memory */
	}
	return (struct aq_view){
		.total_bytes = aq_limit_total(limit + overhead, physical_total),
		.used_bytes = used + overhead,
		.free_bytes = aq_limit_free(limit, used, physical_free),
	};
}

bool aq_account_shared(int device)
{
	if (device < 0)
		return false;
	return aq_account_container_bytes(device) != aq_account_own_bytes(device);
}

uint64_t aq_account_context_bytes(int device)
{
	if (device < 0)
		return 0;
	uint64_t granted = atomic_load_explicit(&limits->device[device].context_bytes, memory_order_relaxed);

	return granted ? granted : atomic_load_explicit(&accounts[device].line->context_bytes, memory_order_relaxed);
}

void aq_account_learn_context_bytes(int device, uint64_t bytes)
{
	if (device >= 0)
		atomic_store_explicit(&accounts[device].line->context_bytes, bytes, memory_order_relaxed);
}

void aq_account_contexts_add(int device, int count)
{
	if (device >= 0)
		atomic_fetch_add_explicit(&accounts[device].mine->contexts, (uint32_t)count, memory_order_relaxed);
}
