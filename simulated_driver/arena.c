/* SPDX-License-Identifier: Apache-2.0 */
/*
 * arena.c - the memory of a pool. All of it is under the device's memory lock.
 *
 * A pool has addresses in arenas. Pages of an arena have memory behind them from when a request needs them until the pool gives them back,
 * so a chunk is one of three: in use, free (memory behind it, in the pool's heap), or vacant (addresses only, in the pool's list). A pool
 * grows where the least new memory will do, mostly behind the last chunk, so blocks of any size lie one behind the other.
 *
 * Memory is taken, and given back at a synchronisation, in whole pieces of 32 MiB. When that is refused, in pages of 2 MiB.
 */
#include "simulated_driver/cuda_internal.h"

#define PIECE_BYTES (UINT64_C(32) << 20)
#define ARENA_BYTES (UINT64_C(1) << 30)
#define PIECE_UNITS ((uint32_t)(PIECE_BYTES / SIM_UNIT_BYTES))
#define PAGE_UNITS ((uint32_t)(SIM_GRANULE_BYTES / SIM_UNIT_BYTES))
#define FIRST_ROW 10    /* of the heap's lists that have chunks of a page or more */

static uint32_t up(uint32_t units, uint32_t to)
{
	return (units + to - 1) / to * to;
}

static uint32_t down(uint32_t units, uint32_t to)
{
	return units / to * to;
}

/* ---- chunks ---------------------------------------------------------------------------------------------------------- */

static uint32_t index_of(const struct sim_unit *unit)
{
	return (uint32_t)(unit - unit->segment->units);
}

static struct sim_unit *before(struct sim_unit *unit)
{
	return unit->previous ? unit - unit->previous : NULL;
}

static struct sim_unit *after(struct sim_unit *unit)
{
	return index_of(unit) + unit->length < unit->segment->n_units ? unit + unit->length : NULL;
}

static bool is_vacant(const struct sim_unit *unit)
{
	return unit && unit->bytes == SIM_VACANT;
}

static uint32_t free_units(const struct sim_unit *unit)
{
	return unit && unit->bytes == 0 ? unit->length : 0;
}

static void link_vacant(CUmemoryPool pool, struct sim_unit *unit)
{
	unit->bytes = SIM_VACANT;
	unit->free.prev = NULL;
	unit->free.next = pool->vacant;
	if (pool->vacant)
		pool->vacant->free.prev = unit;
	pool->vacant = unit;
}

static void unlink_vacant(CUmemoryPool pool, struct sim_unit *unit)
{
	if (unit->free.prev)
		unit->free.prev->free.next = unit->free.next;
	else
		pool->vacant = unit->free.next;
	if (unit->free.next)
		unit->free.next->free.prev = unit->free.prev;
	unit->bytes = 0;
}

/* A chunk in neither heap nor list becomes vacant, one with its vacant neighbours. */
static void add_vacant(CUmemoryPool pool, struct sim_unit *unit)
{
	struct sim_unit *next = after(unit), *previous = before(unit);
	unit->bytes = 0;
	if (is_vacant(next)) {
		unlink_vacant(pool, next);
		sim_unit_join(unit, next);
	}
	if (is_vacant(previous)) {
		unlink_vacant(pool, previous);
		sim_unit_join(previous, unit);
		unit = previous;
	}
	link_vacant(pool, unit);
}

/* `count` units from `first` on of a free chunk lose their memory. */
static void vacate(CUmemoryPool pool, struct sim_unit *unit, uint32_t first, uint32_t count)
{
	struct sim_unit *part = unit;
	sim_heap_remove(&pool->heap, unit);
	if (first) {
		part = sim_unit_split(unit, first);
		sim_heap_insert(&pool->heap, unit);
	}
	if (part->length > count)
		sim_heap_insert(&pool->heap, sim_unit_split(part, count));
	add_vacant(pool, part);
}

/* `count` units at one end of a vacant chunk get memory; the free chunk that they are in then. */
static struct sim_unit *occupy(CUmemoryPool pool, struct sim_unit *vacant, uint32_t count, bool at_end)
{
	struct sim_unit *part = vacant;
	unlink_vacant(pool, vacant);
	if (count < vacant->length && at_end) {
		part = sim_unit_split(vacant, vacant->length - count);
		link_vacant(pool, vacant);
	} else if (count < vacant->length) {
		link_vacant(pool, sim_unit_split(vacant, count));
	}
	part->bytes = 0;
	return sim_heap_give(&pool->heap, part);
}

/* ---- arenas ---------------------------------------------------------------------------------------------------------- */

static bool add_arena_of(CUmemoryPool pool, uint64_t bytes)
{
	struct sim_segment *arena = sim_segment_new(pool->device, &pool->heap, pool, bytes);
	if (!arena)
		return false;
	sim_heap_remove(&pool->heap, &arena->units[0]);
	add_vacant(pool, &arena->units[0]);
	arena->prev = NULL;
	arena->next = pool->arenas;
	if (pool->arenas)
		pool->arenas->prev = arena;
	pool->arenas = arena;
	return true;
}

/* For at least so many units; on a machine with few addresses only for these. */
static bool add_arena(CUmemoryPool pool, uint32_t units)
{
	uint64_t bytes = (uint64_t)up(units, PIECE_UNITS) * SIM_UNIT_BYTES;
	return (bytes < ARENA_BYTES && add_arena_of(pool, ARENA_BYTES)) || add_arena_of(pool, bytes);
}

static void delete_arena(CUmemoryPool pool, struct sim_segment *arena)
{
	unlink_vacant(pool, &arena->units[0]);
	if (arena->prev)
		arena->prev->next = arena->next;
	else
		pool->arenas = arena->next;
	if (arena->next)
		arena->next->prev = arena->prev;
	sim_segment_delete(arena);
}

/* Arenas without memory go, except for `spare` of them, because a pool that is empty now and then is the usual case. */
static void tidy(CUmemoryPool pool, unsigned spare)
{
	for (struct sim_segment *arena = pool->arenas, *next; arena; arena = next) {
		next = arena->next;
		if (!is_vacant(&arena->units[0]) || arena->units[0].length != arena->n_units)
			continue;
		if (spare)
			spare--;
		else
			delete_arena(pool, arena);
	}
}

void sim_arenas_delete(CUmemoryPool pool)
{
	tidy(pool, 0);
}

/* ---- growing --------------------------------------------------------------------------------------------------------- */

/* Where a pool may grow, and by how much for the request to fit there together with the free chunks around. */
struct place {
	struct sim_unit *vacant;
	uint32_t need;          /* whole pages */
	bool at_end;
};

static bool place_in(struct sim_unit *vacant, uint32_t units, struct place *place)
{
	uint32_t left = free_units(before(vacant)), right = free_units(after(vacant));
	*place = (struct place){ .vacant = vacant, .at_end = left == 0 && right != 0 };
	uint32_t beside = place->at_end ? right : left;
	place->need = up(units > beside ? units - beside : 1, PAGE_UNITS);
	if (place->need <= vacant->length)
		return true;
	place->need = vacant->length;
	return left + vacant->length + right >= units;
}

static bool is_better(const struct place *a, const struct place *b)
{
	return !b->vacant || a->need < b->need || (a->need == b->need && a->vacant->length < b->vacant->length);
}

static bool find_place(CUmemoryPool pool, uint32_t units, struct place *best)
{
	struct place place;
	best->vacant = NULL;
	for (struct sim_unit *vacant = pool->vacant; vacant; vacant = vacant->free.next)
		if (place_in(vacant, units, &place) && is_better(&place, best))
			*best = place;
	return best->vacant != NULL;
}

/* To the next border of a piece, as far as there are addresses. */
static uint32_t whole_pieces(const struct place *place)
{
	uint32_t first = index_of(place->vacant), end = first + place->vacant->length;
	uint32_t border = place->at_end ? down(end - place->need, PIECE_UNITS) : up(first + place->need, PIECE_UNITS);
	if (place->at_end)
		return border > first ? end - border : place->vacant->length;
	return border < end ? border - first : place->vacant->length;
}

static bool take_memory(CUmemoryPool pool, uint64_t bytes)
{
	bool allowed = !pool->properties.maxSize || pool->reserved + bytes <= pool->properties.maxSize;
	if (!allowed || !sim_memory_charge(pool->device, bytes))
		return false;
	pool->reserved += bytes;
	if (pool->reserved > pool->reserved_high)
		pool->reserved_high = pool->reserved;
	return true;
}

static struct sim_unit *grow_once(CUmemoryPool pool, uint32_t units, bool in_pieces)
{
	struct place place;
	if (!find_place(pool, units, &place) && !(add_arena(pool, units) && find_place(pool, units, &place)))
		return NULL;
	uint32_t count = in_pieces ? whole_pieces(&place) : place.need;
	if (take_memory(pool, (uint64_t)count * SIM_UNIT_BYTES))
		return occupy(pool, place.vacant, count, place.at_end);
	tidy(pool, 1);
	return NULL;
}

struct sim_unit *sim_arena_grow(CUmemoryPool pool, uint32_t units)
{
	struct sim_unit *unit = sim_heap_find_any(&pool->heap, units);
	if (!unit)
		unit = grow_once(pool, units, true);
	if (!unit)
		unit = grow_once(pool, units, false);
	if (!unit && sim_pools_release_all(pool->device))
		unit = grow_once(pool, units, false);
	return unit;
}

/* ---- giving back ----------------------------------------------------------------------------------------------------- */

/* The part of a free chunk that may go: pieces, or pages, without a live chunk in them. */
static uint32_t give_back(CUmemoryPool pool, struct sim_unit *unit, uint64_t most_bytes, bool in_pieces)
{
	uint32_t step = in_pieces ? PIECE_UNITS : PAGE_UNITS, first = index_of(unit), end = first + unit->length;
	bool left_open = !before(unit) || is_vacant(before(unit)), right_open = !after(unit) || is_vacant(after(unit));
	uint32_t low = left_open ? first : up(first, step), high = right_open ? end : down(end, step);
	if (low >= high)
		return 0;
	uint32_t count = high - low;
	if (count > most_bytes / SIM_UNIT_BYTES)
		count = down((uint32_t)(most_bytes / SIM_UNIT_BYTES), step);
	if (!count)
		return 0;
	sim_segment_drop(unit->segment, high - count, count);
	vacate(pool, unit, high - count - first, count);
	return count;
}

bool sim_arena_release(CUmemoryPool pool, uint64_t keep, bool in_pieces)
{
	bool any = false;
	for (uint32_t list = FIRST_ROW * SIM_HEAP_COLUMNS; list < SIM_HEAP_ROWS * SIM_HEAP_COLUMNS; list++) {
		struct sim_unit *unit = pool->heap.lists[list / SIM_HEAP_COLUMNS][list % SIM_HEAP_COLUMNS], *next;
		for (; unit && pool->reserved > keep; unit = next) {
			next = unit->free.next;
			uint64_t bytes = (uint64_t)give_back(pool, unit, pool->reserved - keep, in_pieces) * SIM_UNIT_BYTES;
			pool->reserved -= bytes;
			sim_memory_uncharge(pool->device, bytes);
			any |= bytes != 0;
		}
	}
	if (any)
		tidy(pool, 1);
	return any;
}

/* ---- finding a chunk by an address inside it ------------------------------------------------------------------------- */

/* A bit for each unit where a chunk in use begins, and one for each word of these that is not 0. They lie behind the units. */
static uint64_t *starts_of(const struct sim_segment *arena)
{
	return (uint64_t *)(uintptr_t)&arena->units[arena->n_units];
}

static uint64_t *summary_of(const struct sim_segment *arena)
{
	return starts_of(arena) + arena->n_units / 64;
}

void sim_arena_mark(struct sim_unit *unit, bool in_use)
{
	uint32_t index = index_of(unit), word = index / 64;
	uint64_t *starts = starts_of(unit->segment), *summary = summary_of(unit->segment);
	if (in_use)
		starts[word] |= UINT64_C(1) << index % 64;
	else
		starts[word] &= ~(UINT64_C(1) << index % 64);
	if (starts[word])
		summary[word / 64] |= UINT64_C(1) << word % 64;
	else
		summary[word / 64] &= ~(UINT64_C(1) << word % 64);
}

static uint32_t highest(uint64_t bits)
{
	return 63 - (uint32_t)__builtin_clzll(bits);
}

const struct sim_unit *sim_arena_chunk_around(const struct sim_segment *arena, uint32_t index)
{
	const uint64_t *starts = starts_of(arena), *summary = summary_of(arena);
	uint32_t word = index / 64, group = word / 64;
	uint64_t bits = starts[word] << (63 - index % 64) >> (63 - index % 64);
	if (!bits) {
		uint64_t words = summary[group] & ((UINT64_C(1) << word % 64) - 1);
		while (!words && group)
			words = summary[--group];
		if (!words)
			return NULL;
		word = group * 64 + highest(words);
		bits = starts[word];
	}
	const struct sim_unit *unit = &arena->units[word * 64 + highest(bits)];
	return index - index_of(unit) < unit->length ? unit : NULL;
}
