/* SPDX-License-Identifier: Apache-2.0 */
#include "interpose/spread.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "account/account.h"
#include "interpose/deferred.h"
#include "limit/memory.h"
#include "shim.h"

#define WORD_BITS 64u
#define NO_OWNER UINT64_MAX /* no context: what was left behind is credited when the stream has passed, and not with its home */

struct aq_spread {
	uint64_t base, pages;
	uint64_t page_bytes;                /* of a block of one page: its own size */
	uint64_t owner;
	int home;                           /* the device that was charged when it was made, else the first it went to; owner is there */
	bool keeps;
	bool gone;                          /* the last user destroys it */
	unsigned users;                     /* moves under way */
	uint64_t change;
	uint64_t charged[AQ_MAX_DEVICES];
	enum aq_kind kind[AQ_MAX_DEVICES];  /* of what is charged */
	uint64_t *on[AQ_MAX_DEVICES];       /* a bit for each page; NULL = no page */
};

_Atomic unsigned aq_spread_count;
/* Base address -> spread (owner). */
static struct aq_map spreads;
/* Held while pages are counted and charged; never across a call to the driver (latch.h). */
static pthread_mutex_t gate = PTHREAD_MUTEX_INITIALIZER;

static struct aq_spread *find(uint64_t base)
{
	struct aq_entry entry;

	return aq_map_get(&spreads, base, &entry) ? (struct aq_spread *)(uintptr_t)entry.owner : NULL;
}

static void destroy(struct aq_spread *spread)
{
	for (int device = 0; device < AQ_MAX_DEVICES; device++)
		free(spread->on[device]);
	free(spread);
}

static enum aq_kind kind_on(int device)
{
	return aq_account_oversubscribed(device) ? AQ_VIRTUAL : AQ_MANAGED;
}

static bool is_on(const struct aq_spread *spread, int device, uint64_t page)
{
	return spread->on[device] && spread->on[device][page / WORD_BITS] >> page % WORD_BITS & 1;
}

static void set_on(struct aq_spread *spread, int device, uint64_t page, bool on)
{
	uint64_t bit = (uint64_t)1 << page % WORD_BITS, *word = &spread->on[device][page / WORD_BITS];

	*word = on ? *word | bit : *word & ~bit;
}

static uint64_t *new_bits(const struct aq_spread *spread)
{
	return calloc(spread->pages / WORD_BITS + 1, sizeof(uint64_t));
}

static bool is_managed(const struct aq_entry *held)
{
	return held->kind == AQ_MANAGED || held->kind == AQ_VIRTUAL;
}

/* All its pages are at home. */
static bool begin_at_home(struct aq_spread *spread, const struct aq_entry *held)
{
	int home = (int)held->device;

	spread->home = home;
	spread->owner = held->owner;
	spread->keeps = held->kind == AQ_VIRTUAL;
	spread->charged[home] = held->bytes;
	spread->kind[home] = (enum aq_kind)held->kind;
	spread->on[home] = new_bits(spread);
	if (spread->on[home])
		memset(spread->on[home], 0xff, (spread->pages / WORD_BITS + 1) * sizeof(uint64_t));
	return spread->on[home];
}

/* The entry leaves the map while its charge is taken over, so that no other thread can uncharge it too. */
static struct aq_spread *add(const struct aq_spread_block *block)
{
	struct aq_spread *spread = calloc(1, sizeof(*spread));
	struct aq_entry entry = { .key = block->base, .owner = (uintptr_t)spread }, held;

	if (!spread)
		return NULL;
	spread->base = block->base;
	spread->pages = (block->bytes + AQ_PAGE_BYTES - 1) / AQ_PAGE_BYTES;
	spread->page_bytes = spread->pages > 1 ? AQ_PAGE_BYTES : aq_footprint_bytes(block->bytes);
	spread->home = AQ_NO_DEVICE;
	bool known = aq_map_take(block->allocations, block->base, &held);
	bool added = !(known && is_managed(&held)) || begin_at_home(spread, &held);
	added = added && aq_map_put(&spreads, &entry);
	if (added && known && is_managed(&held))
		held.bytes = 0;
	if (known)
		aq_map_put(block->allocations, &held);
	if (added) {
		atomic_fetch_add(&aq_spread_count, 1);
		return spread;
	}
	destroy(spread);
	return NULL;
}

static struct aq_spread *find_or_add(const struct aq_spread_block *block)
{
	struct aq_spread *spread = find(block->base);

	return spread ? spread : add(block);
}

struct containing {
	uint64_t address;
	bool found;
};

static bool contains(const struct aq_entry *entry, void *context)
{
	const struct aq_spread *spread = (const struct aq_spread *)(uintptr_t)entry->owner;
	struct containing *containing = context;

	containing->found |= containing->address - spread->base < spread->pages * AQ_PAGE_BYTES;
	return false;
}

bool aq_spread_contains(uint64_t address)
{
	struct containing containing = { .address = address };

	aq_map_drain(&spreads, contains, NULL, &containing); /* removes nothing */
	return containing.found;
}

/* ---- moving ---------------------------------------------------------------------------------------------------- */

/* With the gate held. */
static bool charge_pages(struct aq_spread_move *move)
{
	struct aq_spread *spread = move->spread;
	uint64_t count = 0;

	for (uint64_t page = move->first; page < move->last; page++)
		count += !is_on(spread, move->device, page);
	if (!spread->charged[move->device])
		spread->kind[move->device] = kind_on(move->device);
	if (!aq_charge_quick(move->device, spread->kind[move->device], count * spread->page_bytes))
		return false;
	move->added_bytes = count * spread->page_bytes;
	spread->users++;
	spread->charged[move->device] += move->added_bytes;
	for (uint64_t page = move->first; page < move->last; page++) {
		if (is_on(spread, move->device, page))
			continue;
		set_on(spread, move->device, page, true);
		move->added[page / WORD_BITS] |= (uint64_t)1 << page % WORD_BITS;
	}
	move->change = ++spread->change;
	return true;
}

static bool begin_locked(struct aq_spread_move *move, const struct aq_spread_block *block, uint64_t address, uint64_t bytes)
{
	struct aq_spread *spread = find_or_add(block);

	if (!spread)
		return false;
	if (spread->home == AQ_NO_DEVICE) /* of a module or a pool: it ends with the primary context at the latest */
		spread->home = move->device;
	uint64_t offset = address - block->base, end = spread->pages * AQ_PAGE_BYTES;
	uint64_t most = offset < end ? end - offset : 0;
	bytes = bytes < most ? bytes : most;
	move->spread = spread;
	move->first = offset / AQ_PAGE_BYTES;
	move->last = (offset + bytes + AQ_PAGE_BYTES - 1) / AQ_PAGE_BYTES;
	move->whole_first = (offset + AQ_PAGE_BYTES - 1) / AQ_PAGE_BYTES;
	move->whole_last = offset + bytes >= block->bytes ? spread->pages : (offset + bytes) / AQ_PAGE_BYTES;
	if (!spread->on[move->device])
		spread->on[move->device] = new_bits(spread);
	free(move->added);
	move->added = new_bits(spread);
	return spread->on[move->device] && move->added && charge_pages(move);
}

bool aq_spread_begin(struct aq_spread_move *move, const struct aq_spread_block *block, uint64_t address, uint64_t bytes, int device)
{
	bool fits = false;

	*move = (struct aq_spread_move){ .device = device };
	for (int attempt = 0; device >= 0 && attempt < 2 && !fits; attempt++) {
		if (attempt)
			aq_reclaim(device);
		pthread_mutex_lock(&gate);
		fits = begin_locked(move, block, address, bytes);
		pthread_mutex_unlock(&gate);
	}
	if (!fits) {
		aq_refused(device, bytes);
		free(move->added);
		move->added = NULL;
	}
	return fits;
}

/* The call failed. If another one changed the record meanwhile, it may rely on these pages: they stay charged. With the gate held. */
static void undo(const struct aq_spread_move *move)
{
	struct aq_spread *spread = move->spread;

	if (spread->change != move->change || spread->gone)
		return;
	for (uint64_t page = move->first; page < move->last; page++)
		if (move->added[page / WORD_BITS] >> page % WORD_BITS & 1)
			set_on(spread, move->device, page, false);
	spread->charged[move->device] -= move->added_bytes;
	aq_uncharge(move->device, spread->kind[move->device], move->added_bytes);
}

/* Pages that leave a device: no longer part of its charge in the record. With the gate held. */
static uint64_t take_from(const struct aq_spread_move *move, int device)
{
	struct aq_spread *spread = move->spread;
	uint64_t bytes = 0;

	for (uint64_t page = move->whole_first; page < move->whole_last && spread->on[device]; page++) {
		if (!is_on(spread, device, page))
			continue;
		set_on(spread, device, page, false);
		bytes += spread->page_bytes;
	}
	bytes = bytes < spread->charged[device] ? bytes : spread->charged[device];
	spread->charged[device] -= bytes;
	return bytes;
}

/* Uncharge when the stream has passed; what cannot be followed there stays charged for ever, so the caller keeps it. */
static bool credit_in_stream(const struct aq_spread *spread, int device, uint64_t bytes, CUstream stream, bool per_thread)
{
	struct aq_entry held = {
		.key = spread->base, .bytes = bytes, .owner = NO_OWNER, .device = (uint32_t)device, .kind = spread->kind[device]
	};

	return aq_deferred_add(&held, stream, per_thread);
}

static void leave_others(const struct aq_spread_move *move, CUstream stream, bool per_thread)
{
	struct aq_spread *spread = move->spread;
	uint64_t left[AQ_MAX_DEVICES] = { 0 };

	pthread_mutex_lock(&gate);
	for (int device = 0; device < AQ_MAX_DEVICES && !spread->keeps; device++)
		if (device != move->device && spread->charged[device])
			left[device] = take_from(move, device);
	spread->change++;
	pthread_mutex_unlock(&gate);
	for (int device = 0; device < AQ_MAX_DEVICES; device++) {
		if (!left[device] || credit_in_stream(spread, device, left[device], stream, per_thread))
			continue;
		pthread_mutex_lock(&gate);
		if (!spread->gone)
			spread->charged[device] += left[device];
		pthread_mutex_unlock(&gate);
	}
}

void aq_spread_end(struct aq_spread_move *move, bool made, bool leaves, CUstream stream, bool per_thread)
{
	if (made && leaves)
		leave_others(move, stream, per_thread);
	pthread_mutex_lock(&gate);
	if (!made)
		undo(move);
	if (!--move->spread->users && move->spread->gone)
		destroy(move->spread);
	pthread_mutex_unlock(&gate);
	free(move->added);
}

bool aq_spread_keep(const struct aq_spread_block *block)
{
	pthread_mutex_lock(&gate);
	struct aq_spread *spread = find_or_add(block);
	if (spread)
		spread->keeps = true;
	pthread_mutex_unlock(&gate);
	return spread;
}

/* ---- ending ---------------------------------------------------------------------------------------------------- */

struct aq_spread *aq_spread_ending(uint64_t base)
{
	struct aq_entry entry;

	if (!aq_map_take(&spreads, base, &entry))
		return NULL;
	return (struct aq_spread *)(uintptr_t)entry.owner;
}

static void put_back(struct aq_spread *spread)
{
	struct aq_entry entry = { .key = spread->base, .owner = (uintptr_t)spread };

	aq_map_put(&spreads, &entry); /* without memory to record it, charged until the process ends */
}

void aq_spread_ended(struct aq_spread *spread, bool freed)
{
	if (!spread)
		return;
	if (!freed) {
		put_back(spread);
		return;
	}
	pthread_mutex_lock(&gate);
	for (int device = 0; device < AQ_MAX_DEVICES; device++) {
		if (spread->charged[device])
			aq_uncharge(device, spread->kind[device], spread->charged[device]);
		spread->charged[device] = 0;
	}
	atomic_fetch_sub(&aq_spread_count, 1);
	spread->gone = true;
	if (!spread->users)
		destroy(spread);
	pthread_mutex_unlock(&gate);
}

void aq_spread_ended_in_stream(struct aq_spread *spread, bool freed, CUstream stream, bool per_thread)
{
	for (int device = 0; spread && freed && device < AQ_MAX_DEVICES; device++)
		if (spread->charged[device] && credit_in_stream(spread, device, spread->charged[device], stream, per_thread))
			spread->charged[device] = 0;
	aq_spread_ended(spread, freed);
}

struct owner {
	int device;
	uint64_t owner;
};

static bool belongs_to(const struct aq_entry *entry, void *context)
{
	const struct aq_spread *spread = (const struct aq_spread *)(uintptr_t)entry->owner;
	const struct owner *owner = context;

	return spread->home == owner->device && spread->owner == owner->owner;
}

static void credit(const struct aq_entry *entry, void *context)
{
	(void)context;
	aq_spread_ended((struct aq_spread *)(uintptr_t)entry->owner, true);
}

void aq_spread_context_gone(int device, uint64_t owner)
{
	struct owner ended = { device, owner };

	aq_map_drain(&spreads, belongs_to, credit, &ended);
}

void aq_spread_forget(void)
{
	pthread_mutex_init(&gate, NULL);
	aq_map_forget(&spreads);
	atomic_store(&aq_spread_count, 0);
}
