/* SPDX-License-Identifier: Apache-2.0 */
#include "limit/cost.h"

#include <stddef.h>

#define PROBES 16u

static uint64_t mix(uint64_t x)
{
	x ^= x >> 33;
	x *= 0xff51afd7ed558ccdull;
	x ^= x >> 33;
	x *= 0xc4ceb9fe1a85ec53ull;
	return x ^ x >> 33;
}

/* Never 0. */
static uint64_t key_of(const void *function, uint64_t blocks, uint32_t threads_per_block)
{
	uint64_t key = mix((uint64_t)(uintptr_t)function ^ mix(blocks) ^ (uint64_t)threads_per_block << 40);
	return key ? key : 1;
}

static struct aq_cost_entry *find(struct aq_cost_table *table, uint64_t key)
{
	for (uint32_t i = 0; i < PROBES; i++) {
		struct aq_cost_entry *entry = &table->entries[(key + i) & (AQ_COST_ENTRIES - 1)];
		uint64_t found = atomic_load_explicit(&entry->key, memory_order_relaxed);
		if (found == 0 &&
		    atomic_compare_exchange_strong_explicit(&entry->key, &found, key, memory_order_relaxed, memory_order_relaxed))
			return entry;
		if (found == key)
			return entry;
	}
	return NULL;
}

struct aq_cost_entry *aq_cost_find(struct aq_cost_table *table, const void *function, uint64_t blocks, uint32_t threads_per_block)
{
	struct aq_cost_entry *of_function = find(table, key_of(function, 0, 0));
	struct aq_cost_entry *entry = find(table, key_of(function, blocks, threads_per_block));

	if (!entry)
		return of_function;
	if (entry != of_function)
		atomic_store_explicit(&entry->of_function, of_function, memory_order_relaxed);
	return entry;
}

void aq_cost_forget(struct aq_cost_table *table, const void *function)
{
	uint64_t key = key_of(function, 0, 0);

	for (uint32_t i = 0; i < PROBES; i++) {
		struct aq_cost_entry *entry = &table->entries[(key + i) & (AQ_COST_ENTRIES - 1)];

		if (atomic_load_explicit(&entry->key, memory_order_relaxed) != key)
			continue;
		/* Threads have the entry in their caches: it keeps its key, and knows nothing. */
		atomic_store_explicit(&entry->estimate_ns, 0, memory_order_relaxed);
		atomic_store_explicit(&entry->launches, 0, memory_order_relaxed);
		atomic_store_explicit(&entry->sample_at, 0, memory_order_relaxed);
		atomic_store_explicit(&entry->samples, 0, memory_order_relaxed);
		atomic_store_explicit(&entry->stable, 0, memory_order_relaxed);
		atomic_store_explicit(&entry->window_min_ns, 0, memory_order_relaxed);
		atomic_store_explicit(&entry->previous_min_ns, 0, memory_order_relaxed);
		atomic_store_explicit(&entry->mean_ns, 0, memory_order_relaxed);
		return;
	}
}

uint64_t aq_cost_of_function(const struct aq_cost_entry *entry, uint64_t fallback_ns)
{
	const struct aq_cost_entry *function = entry ? atomic_load_explicit(&entry->of_function, memory_order_relaxed) : NULL;

	/* The first sample of a function may be of a launch that also loaded the code. */
	if (!function || (!atomic_load_explicit(&function->previous_min_ns, memory_order_relaxed) &&
			  atomic_load_explicit(&function->samples, memory_order_relaxed) < 2))
		return fallback_ns;
	return atomic_load_explicit(&function->estimate_ns, memory_order_relaxed);
}

static bool agree(uint64_t a, uint64_t b)
{
	uint64_t low = a < b ? a : b, high = a < b ? b : a;
	return high - low <= low / 8;
}

/* Two threads may finish a window at once; the worst is a window that is one sample short or long. */
static void rotate_window(struct aq_cost_entry *entry, uint64_t window_min_ns)
{
	uint64_t previous = atomic_exchange_explicit(&entry->previous_min_ns, window_min_ns, memory_order_relaxed);
	atomic_store_explicit(&entry->stable,
			      previous && agree(previous, window_min_ns) &&
				      atomic_load_explicit(&entry->mean_ns, memory_order_relaxed) <= 2 * window_min_ns,
			      memory_order_relaxed);
	atomic_store_explicit(&entry->window_min_ns, 0, memory_order_relaxed);
	atomic_store_explicit(&entry->samples, 0, memory_order_relaxed);
	if (!previous)
		atomic_store_explicit(&entry->mean_ns, window_min_ns, memory_order_relaxed);
}

/* Take it into the mean, if there is one. Of two threads that do at once one is lost. Out: the least a launch costs. */
static uint64_t floor_with(struct aq_cost_entry *entry, uint64_t measured_ns)
{
	uint64_t mean = atomic_load_explicit(&entry->mean_ns, memory_order_relaxed);

	if (!mean)
		return 0;
	mean = (mean * (AQ_COST_WINDOW - 1) + measured_ns) / AQ_COST_WINDOW;
	atomic_store_explicit(&entry->mean_ns, mean ? mean : 1, memory_order_relaxed);
	return mean / AQ_COST_MEAN_PART;
}

static void learn(struct aq_cost_entry *entry, uint64_t measured_ns)
{
	uint64_t window_min = atomic_load_explicit(&entry->window_min_ns, memory_order_relaxed);
	if (window_min == 0 || measured_ns < window_min) {
		window_min = measured_ns;
		atomic_store_explicit(&entry->window_min_ns, window_min, memory_order_relaxed);
	}
	uint64_t least = floor_with(entry, measured_ns), estimate = window_min;
	if (atomic_fetch_add_explicit(&entry->samples, 1, memory_order_relaxed) + 1 >= AQ_COST_WINDOW) {
		rotate_window(entry, window_min);
	} else {
		uint64_t previous = atomic_load_explicit(&entry->previous_min_ns, memory_order_relaxed);
		estimate = previous && previous < window_min ? previous : window_min;
	}
	atomic_store_explicit(&entry->estimate_ns, estimate > least ? estimate : least, memory_order_relaxed);
}

void aq_cost_learn(struct aq_cost_entry *entry, uint64_t measured_ns)
{
	struct aq_cost_entry *of_function = atomic_load_explicit(&entry->of_function, memory_order_relaxed);

	if (measured_ns == 0) /* below the event timer's resolution: still some time, and 0 means unknown here */
		measured_ns = 1;
	learn(entry, measured_ns);
	if (of_function)
		learn(of_function, measured_ns);
}
