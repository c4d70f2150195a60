/* SPDX-License-Identifier: Apache-2.0 */
#include "account/map.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

#define CACHE_LINE_BYTES 64u
#define FIRST_CAPACITY 64u
#define SPINS_BEFORE_YIELD 64

static inline void relax(void)
{
#if defined(__x86_64__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

static inline void lock(struct aq_map_stripe *stripe)
{
	unsigned spins = 0;

	while (atomic_exchange_explicit(&stripe->locked, 1, memory_order_acquire)) {
		while (atomic_load_explicit(&stripe->locked, memory_order_relaxed)) {
			if (++spins % SPINS_BEFORE_YIELD)
				relax();
			else
				sched_yield(); /* the holder may have been preempted */
		}
	}
}

static inline void unlock(struct aq_map_stripe *stripe)
{
	atomic_store_explicit(&stripe->locked, 0, memory_order_release);
}

/* Addresses are aligned and close together: both halves of a long product take part, so that all their bits do. The top bits choose the
 * stripe, the low ones the place. */
static inline uint64_t hash_of(uint64_t key)
{
	unsigned __int128 product = (unsigned __int128)(key ^ 0x9e3779b97f4a7c15ull) * 0xa0761d6478bd642full;

	return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline struct aq_map_stripe *stripe_of(struct aq_map *map, uint64_t hash)
{
	return &map->stripe[(hash >> 56) % AQ_MAP_STRIPES];
}

/* The entry with this key, or the free place where it would go. */
static inline struct aq_entry *place_of(const struct aq_map_stripe *stripe, uint64_t key, uint64_t hash)
{
	uint32_t mask = stripe->capacity - 1;

	for (uint32_t i = (uint32_t)hash & mask;; i = (i + 1) & mask)
		if (stripe->entries[i].key == key || stripe->entries[i].key == 0)
			return &stripe->entries[i];
}

static bool grow(struct aq_map_stripe *stripe)
{
	struct aq_map_stripe larger = { .capacity = stripe->capacity ? stripe->capacity * 2 : FIRST_CAPACITY };

	/* An entry never lies in two cache lines: with many entries, each line is a miss. */
	larger.entries = aligned_alloc(CACHE_LINE_BYTES, larger.capacity * sizeof(*larger.entries));
	if (!larger.entries)
		return false;
	memset(larger.entries, 0, larger.capacity * sizeof(*larger.entries));
	for (uint32_t i = 0; i < stripe->capacity; i++) {
		const struct aq_entry *entry = &stripe->entries[i];

		if (entry->key)
			*place_of(&larger, entry->key, hash_of(entry->key)) = *entry;
	}
	free(stripe->entries);
	stripe->entries = larger.entries;
	stripe->capacity = larger.capacity;
	return true;
}

/* Close the gap at `hole`: entries that probed past it move up, so that no tombstones pile up. */
static void remove_at(struct aq_map_stripe *stripe, uint32_t hole)
{
	uint32_t mask = stripe->capacity - 1;

	for (uint32_t i = (hole + 1) & mask; stripe->entries[i].key; i = (i + 1) & mask) {
		uint32_t home = (uint32_t)hash_of(stripe->entries[i].key) & mask;

		if (((i - home) & mask) >= ((i - hole) & mask)) {
			stripe->entries[hole] = stripe->entries[i];
			hole = i;
		}
	}
	stripe->entries[hole].key = 0;
	stripe->count--;
}

bool aq_map_replace(struct aq_map *map, const struct aq_entry *entry, struct aq_entry *replaced)
{
	uint64_t hash = hash_of(entry->key);
	struct aq_map_stripe *stripe = stripe_of(map, hash);
	bool fits = true;

	if (!entry->key)
		return false;
	lock(stripe);
	if (2 * (stripe->count + 1) > stripe->capacity) /* half empty: a search then ends at its first places */
		fits = grow(stripe) || stripe->count + 1 < stripe->capacity;
	if (fits) {
		struct aq_entry *place = place_of(stripe, entry->key, hash);

		stripe->count += place->key == 0;
		if (replaced)
			*replaced = *place;
		*place = *entry;
	}
	unlock(stripe);
	return fits;
}

static inline bool look_up(struct aq_map *map, uint64_t key, struct aq_entry *entry, bool remove)
{
	uint64_t hash = hash_of(key);
	struct aq_map_stripe *stripe = stripe_of(map, hash);
	bool found = false;

	if (!key)
		return false;
	lock(stripe);
	if (stripe->count) {
		struct aq_entry *place = place_of(stripe, key, hash);

		found = place->key == key;
		if (found)
			*entry = *place;
		if (found && remove)
			remove_at(stripe, (uint32_t)(place - stripe->entries));
	}
	unlock(stripe);
	return found;
}

bool aq_map_take(struct aq_map *map, uint64_t key, struct aq_entry *entry)
{
	return look_up(map, key, entry, true);
}

bool aq_map_get(struct aq_map *map, uint64_t key, struct aq_entry *entry)
{
	return look_up(map, key, entry, false);
}

/* Remove one matching entry of a stripe; false when no entry matches. */
static bool take_match(struct aq_map_stripe *stripe, bool (*matches)(const struct aq_entry *, void *), void *context, uint32_t *from,
		       struct aq_entry *entry)
{
	bool found = false;

	lock(stripe);
	for (; !found && *from < stripe->capacity; *from += !found) {
		const struct aq_entry *place = &stripe->entries[*from];

		found = place->key && matches(place, context);
		if (found) {
			*entry = *place;
			remove_at(stripe, *from); /* another entry may have moved here: look at the place again */
		}
	}
	unlock(stripe);
	return found;
}

void aq_map_drain(struct aq_map *map, bool (*matches)(const struct aq_entry *, void *), void (*removed)(const struct aq_entry *, void *),
		  void *context)
{
	struct aq_entry entry;

	for (unsigned i = 0; i < AQ_MAP_STRIPES; i++) {
		/* A second pass finds what wrapped round the end of the table into a place already passed. */
		for (unsigned pass = 0; pass < 2; pass++) {
			uint32_t from = 0;

			while (take_match(&map->stripe[i], matches, context, &from, &entry))
				removed(&entry, context);
		}
	}
}

size_t aq_map_list(struct aq_map *map, bool (*matches)(const struct aq_entry *, void *), void *context, struct aq_entry *entries,
		   size_t most)
{
	size_t count = 0;

	for (unsigned i = 0; i < AQ_MAP_STRIPES && count < most; i++) {
		struct aq_map_stripe *stripe = &map->stripe[i];

		lock(stripe);
		for (uint32_t at = 0; at < stripe->capacity && count < most; at++)
			if (stripe->entries[at].key && matches(&stripe->entries[at], context))
				entries[count++] = stripe->entries[at];
		unlock(stripe);
	}
	return count;
}

void aq_map_forget(struct aq_map *map)
{
	memset(map, 0, sizeof(*map)); /* the entries are leaked: the allocator's own locks are not known to be free either */
}
