/* SPDX-License-Identifier: Apache-2.0 */
/* What this process holds: a map from a 64-bit key (address or handle) to a few words. Constant time at any number of entries.
 *
 * Striped open addressing. Each stripe has its own spin lock, held for a handful of loads and stores, never across a driver call.
 * An entry is removed before the driver frees the address and put back when the driver refuses: the driver may hand
 * the address out again the moment it is free. */
#ifndef AQ_ACCOUNT_MAP_H
#define AQ_ACCOUNT_MAP_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define AQ_MAP_STRIPES 32

struct aq_entry {
	uint64_t key;    /* never 0 */
	uint64_t bytes;
	uint64_t owner;  /* what it dies with; the meaning is the map's user's */
	uint32_t device;
	uint32_t kind;
};

struct aq_map_stripe {
	_Alignas(64) _Atomic uint32_t locked;
	uint32_t count;
	uint32_t capacity; /* power of two, or 0 */
	struct aq_entry *entries;
};

struct aq_map {
	struct aq_map_stripe stripe[AQ_MAP_STRIPES];
};

/* Add an entry, or replace the one with its key, which is then in `*replaced` (key 0 without one; may be NULL). False when there is no
 * memory for a new entry; the map is then unchanged. */
bool aq_map_replace(struct aq_map *map, const struct aq_entry *entry, struct aq_entry *replaced);
static inline bool aq_map_put(struct aq_map *map, const struct aq_entry *entry)
{
	return aq_map_replace(map, entry, NULL);
}
/* Remove and return. */
bool aq_map_take(struct aq_map *map, uint64_t key, struct aq_entry *entry);
/* Return without removing. */
bool aq_map_get(struct aq_map *map, uint64_t key, struct aq_entry *entry);
/* Remove every entry that `matches` and pass it to `removed` (outside the lock). */
void aq_map_drain(struct aq_map *map, bool (*matches)(const struct aq_entry *, void *), void (*removed)(const struct aq_entry *, void *),
		  void *context);
/* Copy entries that `matches`, `most` at most; how many there are. */
size_t aq_map_list(struct aq_map *map, bool (*matches)(const struct aq_entry *, void *), void *context, struct aq_entry *entries,
		   size_t most);
/* In a forked child: drop all entries, whatever state the locks were in. */
void aq_map_forget(struct aq_map *map);

#endif
