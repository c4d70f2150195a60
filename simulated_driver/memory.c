/* SPDX-License-Identifier: Apache-2.0 */
/*
 * memory.c - the device address space of this process: which addresses exist, what lies there, and where the bytes are.
 *
 * Model. Physical memory is charged to the node in pages of 2 MiB. Requests up to 1 MiB are cut from 2 MiB segments in units of 512 bytes,
 * as in the real driver; a segment is charged while a chunk of it is in use. Larger requests get their own pages. Freeing gives the pages
 * back at once.
 *
 * Every operation on cuMemAlloc's path takes constant time with any number of live allocations: two-level segregated fit inside segments,
 * free address ranges by size class, and a table from page to its content. (A large allocation writes one table entry per page.)
 *
 * Bytes: device windows are reserved without access, so that a CPU that follows a device pointer faults. `shadow` further on lies memory of
 * the same size that is mapped without reserving anything; a copy or fill touches it, freeing what was touched drops the pages again.
 */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "simulated_driver/cuda_internal.h"

#define SMALL_MAX_BYTES (UINT64_C(1) << 20)
#define UNITS_PER_GRANULE ((uint32_t)(SIM_GRANULE_BYTES / SIM_UNIT_BYTES))
#if defined(__SANITIZE_THREAD__)
#define WINDOW_BYTES_MAX (UINT64_C(64) << 30)   /* ThreadSanitizer leaves applications 1.5 TiB of addresses */
#else
#define WINDOW_BYTES_MAX (UINT64_C(2) << 40)    /* per device; callers of cuMemAddressReserve are generous */
#endif
#define WINDOW_BYTES_MIN (UINT64_C(4) << 30)
#define LOW_WINDOW_BYTES (UINT64_C(1) << 30)    /* for the 32-bit pointers of the oldest entry points */

static struct {
	uint64_t base, bytes_each;
	int n_devices;
	struct sim_device *devices;
	pthread_mutex_t lock;               /* of the two windows that belong to no device */
	struct sim_window managed, low;
} space = { .lock = PTHREAD_MUTEX_INITIALIZER };

uint64_t sim_next_id(void)
{
	static _Atomic uint64_t last_id;
	return atomic_fetch_add_explicit(&last_id, 1, memory_order_relaxed) + 1;
}

/* ---- windows --------------------------------------------------------------------------------------------------------- */

static void *map_nothing(void *hint, uint64_t bytes, int protection, int flags)
{
	void *at = mmap(hint, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
	return at == MAP_FAILED ? NULL : at;
}

/* A leak checker in the process does not look into mappings, and would report what only our tables refer to as lost. */
extern void __lsan_register_root_region(const void *start, size_t bytes) __attribute__((weak));
extern void __lsan_unregister_root_region(const void *start, size_t bytes) __attribute__((weak));

/* Only the first `referring` bytes have pointers to what malloc gave. */
static void *map_table(uint64_t bytes, uint64_t referring)
{
	void *table = map_nothing(NULL, bytes, PROT_READ | PROT_WRITE, 0);
	if (table && __lsan_register_root_region)
		__lsan_register_root_region(table, referring);
	return table;
}

static void unmap_table(void *table, uint64_t bytes, uint64_t referring)
{
	if (__lsan_unregister_root_region)
		__lsan_unregister_root_region(table, referring);
	munmap(table, bytes);
}

static bool window_open(struct sim_window *window, pthread_mutex_t *lock, uint64_t base, uint64_t bytes, int64_t shadow)
{
	window->lock = lock;
	window->base = base;
	window->bytes = bytes;
	window->shadow = shadow;
	uint64_t table_bytes = bytes / SIM_GRANULE_BYTES * sizeof *window->granules;
	window->granules = map_table(table_bytes, table_bytes);
	return window->granules != NULL;
}

/* Make [at, at + bytes) usable for bytes that exist only once touched, page by small page, and never in a core file. */
static bool make_shadow(uint64_t at, uint64_t bytes)
{
	void *start = (void *)(uintptr_t)at;
	if (!map_nothing(start, bytes, PROT_READ | PROT_WRITE, MAP_FIXED))
		return false;
	madvise(start, bytes, MADV_NOHUGEPAGE);
	madvise(start, bytes, MADV_DONTDUMP);
	return true;
}

/* One reservation holds all device windows, then the managed window, then the shadows of the device windows. */
static bool reserve_space(int n_devices)
{
	for (uint64_t each = WINDOW_BYTES_MAX; each >= WINDOW_BYTES_MIN; each /= 2) {
		uint64_t devices = each * (uint64_t)n_devices, total = 2 * devices + each;
		void *at = map_nothing(NULL, total + SIM_GRANULE_BYTES, PROT_NONE, 0);
		if (!at)
			continue;
		uint64_t base = ((uint64_t)(uintptr_t)at + SIM_GRANULE_BYTES - 1) & ~(SIM_GRANULE_BYTES - 1);
		if (make_shadow(base + devices, each + devices)) {
			space.base = base;
			space.bytes_each = each;
			return true;
		}
		munmap(at, total + SIM_GRANULE_BYTES);
	}
	return false;
}

/* Addresses below 4 GiB, needed only by the entry points without suffix. On a machine without such addresses, these refuse. */
static void open_low_window(void)
{
	for (uint64_t hint = UINT64_C(0xc0000000); hint >= UINT64_C(0x10000000); hint -= UINT64_C(0x10000000)) {
		void *at = map_nothing((void *)(uintptr_t)hint, LOW_WINDOW_BYTES, PROT_NONE, MAP_FIXED_NOREPLACE);
		if (!at)
			continue;
		uint64_t base = (uint64_t)(uintptr_t)at;
		bool is_low = base + LOW_WINDOW_BYTES <= UINT64_C(0x100000000);
		void *shadow = is_low ? map_nothing(NULL, LOW_WINDOW_BYTES, PROT_READ | PROT_WRITE, 0) : NULL;
		if (shadow && window_open(&space.low, &space.lock, base, LOW_WINDOW_BYTES, (int64_t)((uint64_t)(uintptr_t)shadow - base)))
			return;
		munmap(at, LOW_WINDOW_BYTES);
	}
}

bool sim_memory_init(struct sim_device *devices, int n_devices)
{
	if (space.base)
		return true;
	if (!reserve_space(n_devices))
		return false;
	uint64_t each = space.bytes_each, end = space.base + each * (uint64_t)n_devices;
	space.devices = devices;
	for (int i = 0; i < n_devices; i++) {
		struct sim_memory *memory = &devices[i].memory;
		int64_t shadow = (int64_t)(each * (uint64_t)n_devices + each);
		memory->file = -1;
		if (!sim_mutex_init(&memory->lock) ||
		    !window_open(&memory->window, &memory->lock, space.base + each * (uint64_t)i, each, shadow))
			return false;
	}
	open_low_window();
	space.n_devices = n_devices;
	return window_open(&space.managed, &space.lock, end, each, 0);
}

static bool inside(const struct sim_window *window, uint64_t address)
{
	return address - window->base < window->bytes;
}

struct sim_device *sim_memory_device_of(CUdeviceptr address)
{
	uint64_t index = (address - space.base) / (space.bytes_each ? space.bytes_each : 1);
	return address >= space.base && index < (uint64_t)space.n_devices ? &space.devices[index] : NULL;
}

struct sim_window *sim_memory_window_of(CUdeviceptr address)
{
	struct sim_device *device = sim_memory_device_of(address);
	if (device)
		return &device->memory.window;
	if (inside(&space.managed, address))
		return &space.managed;
	return inside(&space.low, address) ? &space.low : NULL;
}

bool sim_memory_is_ours(CUdeviceptr address)
{
	return sim_memory_window_of(address) != NULL;
}

bool sim_memory_back(const struct sim_window *window, uint64_t address, uint64_t bytes, int fd, uint64_t offset)
{
	return mmap(sim_shadow(window, address), bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, (off_t)offset) != MAP_FAILED;
}

void sim_memory_unback(const struct sim_window *window, uint64_t address, uint64_t bytes)
{
	make_shadow((uint64_t)(uintptr_t)sim_shadow(window, address), bytes);
}

static void drop_pages(const struct sim_window *window, uint64_t address, uint64_t bytes)
{
	madvise(sim_shadow(window, address), bytes, MADV_DONTNEED);
}

/* ---- address ranges -------------------------------------------------------------------------------------------------- */

/* Round a number of pages up to a size class (eight per doubling) and name the class: equal classes are interchangeable. */
static uint32_t size_class(uint64_t *granules)
{
	if (*granules <= 16)
		return (uint32_t)*granules;
	uint32_t shift = 60 - (uint32_t)__builtin_clzll(*granules);     /* leaves the top four bits: 8..15 */
	uint64_t top = (*granules + (UINT64_C(1) << shift) - 1) >> shift;
	*granules = top << shift;
	if (top == 16) {
		top = 8;
		shift++;
	}
	return 16 + shift * 8 + (uint32_t)(top - 8);
}

static struct sim_va_range *va_reuse(struct sim_window *window, uint32_t class)
{
	struct sim_va_range *range = window->free_ranges[class];
	if (range)
		window->free_ranges[class] = range->next;
	return range;
}

/* `granules` free pages or somewhat more; NULL when the window is used up. The window's lock is held. */
static struct sim_va_range *va_take(struct sim_window *window, uint64_t granules)
{
	uint32_t class = size_class(&granules);
	struct sim_va_range *range = va_reuse(window, class);
	if (range)
		return range;
	/* a window is small where a sanitizer leaves few addresses: then a larger range serves, too */
	if (granules > window->bytes / SIM_GRANULE_BYTES - window->next_granule) {
		while (!range && ++class < SIM_VA_CLASSES)
			range = va_reuse(window, class);
		return range;
	}
	if (!(range = malloc(sizeof *range)))
		return NULL;
	*range = (struct sim_va_range){ .base = window->base + window->next_granule * SIM_GRANULE_BYTES, .granules = granules };
	window->next_granule += granules;
	return range;
}

static void va_give(struct sim_window *window, struct sim_va_range *range)
{
	uint64_t granules = range->granules;
	uint32_t class = size_class(&granules);
	range->next = window->free_ranges[class];
	window->free_ranges[class] = range;
}

static void set_granules(struct sim_window *window, uint64_t address, uint64_t granules, const void *what)
{
	uintptr_t *entry = &window->granules[(address - window->base) / SIM_GRANULE_BYTES];
	for (uint64_t i = 0; i < granules; i++)
		entry[i] = (uintptr_t)what;
}

static enum sim_range_kind *granule_at(const struct sim_window *window, uint64_t address)
{
	return (enum sim_range_kind *)window->granules[(address - window->base) / SIM_GRANULE_BYTES];
}

static uint64_t granules_for(uint64_t bytes)
{
	return bytes / SIM_GRANULE_BYTES + (bytes % SIM_GRANULE_BYTES != 0);
}

/* ---- physical memory ------------------------------------------------------------------------------------------------- */

bool sim_memory_charge(struct sim_device *device, uint64_t bytes)
{
	if (!sim_claim_slot())
		return false;
	int slot = atomic_load_explicit(&sim_cuda.slot, memory_order_relaxed);
	if (!sim_memory_reserve(sim_cuda.state, slot, &device->domain, bytes))
		return false;
	if (sim_likely(sim_cgroups_allow(sim_cuda.state, device->domain.gpu)))
		return true;
	sim_memory_release(sim_cuda.state, slot, &device->domain, bytes);
	return false;
}

void sim_memory_uncharge(struct sim_device *device, uint64_t bytes)
{
	sim_memory_release(sim_cuda.state, atomic_load_explicit(&sim_cuda.slot, memory_order_relaxed), &device->domain, bytes);
}

/* Pools hold unused memory: it goes back before a request is refused. */
static bool charge_or_squeeze(struct sim_device *device, uint64_t bytes)
{
	return sim_likely(sim_memory_charge(device, bytes)) || (sim_pools_release_all(device) && sim_memory_charge(device, bytes));
}

/* ---- chunks of segments ---------------------------------------------------------------------------------------------- */

/* Lists of free chunks: row = magnitude, column = the next three bits. Rows 0..: lengths below 8 lie in row 0, one column each. */
static void heap_cell(uint32_t units, uint32_t *row, uint32_t *column)
{
	if (units < SIM_HEAP_COLUMNS) {
		*row = 0;
		*column = units;
		return;
	}
	uint32_t magnitude = 31 - (uint32_t)__builtin_clz(units);
	*row = magnitude - 2;
	*column = units >> (magnitude - 3) & 7;
}

void sim_heap_insert(struct sim_heap *heap, struct sim_unit *unit)
{
	uint32_t row, column;
	heap_cell(unit->length, &row, &column);
	unit->bytes = 0;
	unit->free.prev = NULL;
	unit->free.next = heap->lists[row][column];
	if (unit->free.next)
		unit->free.next->free.prev = unit;
	heap->lists[row][column] = unit;
	heap->columns[row] |= (uint8_t)(1u << column);
	heap->rows |= 1u << row;
}

void sim_heap_remove(struct sim_heap *heap, struct sim_unit *unit)
{
	uint32_t row, column;
	heap_cell(unit->length, &row, &column);
	if (unit->free.next)
		unit->free.next->free.prev = unit->free.prev;
	if (unit->free.prev) {
		unit->free.prev->free.next = unit->free.next;
		return;
	}
	heap->lists[row][column] = unit->free.next;
	if (!unit->free.next) {
		heap->columns[row] &= (uint8_t)~(1u << column);
		if (!heap->columns[row])
			heap->rows &= ~(1u << row);
	}
}

#define SAME_CELL_TRIES 4

/* First the chunks of about this length, which may be just long enough: memory of one size comes and goes. */
static struct sim_unit *heap_search_cell(const struct sim_heap *heap, uint32_t units)
{
	uint32_t row, column;
	heap_cell(units, &row, &column);
	struct sim_unit *unit = heap->lists[row][column];
	for (int i = 0; unit && i < SAME_CELL_TRIES; i++, unit = unit->free.next)
		if (unit->length >= units)
			return unit;
	return NULL;
}

/* Then the first list with only chunks that are long enough. */
static struct sim_unit *heap_search(const struct sim_heap *heap, uint32_t units)
{
	uint32_t row, column;
	struct sim_unit *unit = heap_search_cell(heap, units);
	if (unit)
		return unit;
	if (units >= SIM_HEAP_COLUMNS)
		units += (1u << (31 - (uint32_t)__builtin_clz(units) - 3)) - 1;
	heap_cell(units, &row, &column);
	uint32_t columns = heap->columns[row] & (0xffu << column);
	if (!columns) {
		uint32_t rows = row + 1 < SIM_HEAP_ROWS ? heap->rows & (~0u << (row + 1)) : 0;
		if (!rows)
			return NULL;
		row = (uint32_t)__builtin_ctz(rows);
		columns = heap->columns[row];
	}
	return heap->lists[row][__builtin_ctz(columns)];
}

static uint32_t unit_index(const struct sim_unit *unit)
{
	return (uint32_t)(unit - unit->segment->units);
}

uint64_t sim_unit_address(const struct sim_unit *unit)
{
	return unit->segment->base + (uint64_t)unit_index(unit) * SIM_UNIT_BYTES;
}

/* Let the chunk behind `unit` know how long the one before it is. */
static void tell_next(struct sim_unit *unit)
{
	if (unit_index(unit) + unit->length < unit->segment->n_units)
		unit[unit->length].previous = unit->length;
}

struct sim_unit *sim_unit_split(struct sim_unit *unit, uint32_t units)
{
	struct sim_unit *rest = unit + units;
	rest->segment = unit->segment;
	rest->length = unit->length - units;
	rest->previous = units;
	rest->bytes = 0;
	unit->length = units;
	tell_next(rest);
	return rest;
}

void sim_unit_join(struct sim_unit *unit, struct sim_unit *next)
{
	unit->length += next->length;
	next->bytes = 0;
	tell_next(unit);
}

struct sim_unit *sim_heap_take_from(struct sim_heap *heap, struct sim_unit *unit, uint32_t units)
{
	sim_heap_remove(heap, unit);
	if (unit->length > units)
		sim_heap_insert(heap, sim_unit_split(unit, units));
	return unit;
}

struct sim_unit *sim_heap_find_any(struct sim_heap *heap, uint32_t units)
{
	uint32_t row, column;
	heap_cell(units, &row, &column);
	struct sim_unit *unit = heap->lists[row][column];
	while (unit && unit->length < units)
		unit = unit->free.next;
	return unit;
}

struct sim_unit *sim_heap_take(struct sim_heap *heap, uint32_t units)
{
	struct sim_unit *unit = heap_search(heap, units);
	return unit ? sim_heap_take_from(heap, unit, units) : NULL;
}

struct sim_unit *sim_heap_give(struct sim_heap *heap, struct sim_unit *unit)
{
	struct sim_segment *segment = unit->segment;
	if (unit_index(unit) + unit->length < segment->n_units && unit[unit->length].bytes == 0) {
		struct sim_unit *next = unit + unit->length;
		sim_heap_remove(heap, next);
		unit->length += next->length;
	}
	if (unit->previous && (unit - unit->previous)->bytes == 0) {
		struct sim_unit *before = unit - unit->previous;
		sim_heap_remove(heap, before);
		unit->bytes = 0;
		before->length += unit->length;
		unit = before;
	}
	tell_next(unit);
	sim_heap_insert(heap, unit);
	return unit;
}

/* ---- segments -------------------------------------------------------------------------------------------------------- */

/* With room behind the units for what arena.c keeps there: a bit for each, and one for each word of these. */
static uint64_t segment_object_bytes(uint64_t bytes)
{
	uint64_t units = bytes / SIM_UNIT_BYTES;
	return sizeof(struct sim_segment) + units * sizeof(struct sim_unit) + units / 8 + units / 512;
}

struct sim_segment *sim_segment_new(struct sim_device *device, struct sim_heap *heap, CUmemoryPool pool, uint64_t bytes)
{
	struct sim_window *window = &device->memory.window;
	struct sim_va_range *range = va_take(window, bytes / SIM_GRANULE_BYTES);
	/* Descriptions of units cost memory only where a chunk begins: the array is mapped, not filled. */
	struct sim_segment *segment = range ? map_table(segment_object_bytes(bytes), sizeof *segment) : NULL;
	if (!segment) {
		if (range)
			va_give(window, range);
		return NULL;
	}
	segment->kind = SIM_RANGE_SEGMENT;
	segment->device = device;
	segment->window = window;
	segment->range = range;
	segment->base = range->base;
	segment->bytes = bytes;
	segment->n_units = (uint32_t)(bytes / SIM_UNIT_BYTES);
	segment->heap = heap;
	segment->pool = pool;
	segment->units[0].segment = segment;
	segment->units[0].length = segment->n_units;
	set_granules(window, segment->base, bytes / SIM_GRANULE_BYTES, segment);
	sim_heap_insert(heap, &segment->units[0]);
	return segment;
}

static void stop_sharing(const struct sim_window *window, uint64_t address, uint64_t bytes, struct sim_backing *shared)
{
	sim_memory_unback(window, address, bytes);
	sim_shared_leave(sim_cuda.state, atomic_load(&sim_cuda.slot), shared->device, shared->inode);
	*shared = (struct sim_backing){ 0 };
}

void sim_segment_drop(struct sim_segment *segment, uint32_t first, uint32_t units)
{
	if (segment->touched)
		drop_pages(segment->window, segment->base + (uint64_t)first * SIM_UNIT_BYTES, (uint64_t)units * SIM_UNIT_BYTES);
}

void sim_segment_delete(struct sim_segment *segment)
{
	set_granules(segment->window, segment->base, segment->bytes / SIM_GRANULE_BYTES, NULL);
	if (segment->touched)
		drop_pages(segment->window, segment->base, segment->bytes);
	va_give(segment->window, segment->range);
	unmap_table(segment, segment_object_bytes(segment->bytes), sizeof *segment);
}

/* A charged 2 MiB segment, all free, in the heap of small allocations. */
static bool add_small_segment(struct sim_device *device)
{
	struct sim_memory *memory = &device->memory;
	struct sim_segment *segment = memory->idle;
	if (!segment) {
		segment = sim_segment_new(device, &memory->small, NULL, SIM_GRANULE_BYTES);
		if (!segment)
			return false;
		sim_heap_remove(&memory->small, &segment->units[0]);
		segment->next = memory->idle;
		memory->idle = segment;
	}
	if (!charge_or_squeeze(device, SIM_GRANULE_BYTES))
		return false;
	memory->idle = segment->next;
	sim_heap_insert(&memory->small, &segment->units[0]);
	return true;
}

static void retire_small_segment(struct sim_segment *segment)
{
	struct sim_memory *memory = &segment->device->memory;
	sim_heap_remove(&memory->small, &segment->units[0]);
	if (segment->shared.inode) {
		stop_sharing(segment->window, segment->base, segment->bytes, &segment->shared);
	} else {
		sim_memory_uncharge(segment->device, SIM_GRANULE_BYTES);
		if (segment->touched)
			drop_pages(segment->window, segment->base, segment->bytes);
	}
	segment->touched = false;
	segment->next = memory->idle;
	memory->idle = segment;
}

static CUresult allocate_small(struct sim_device *device, CUcontext owner, uint64_t bytes, CUdeviceptr *out)
{
	uint32_t units = (uint32_t)((bytes + SIM_UNIT_BYTES - 1) / SIM_UNIT_BYTES);
	struct sim_unit *unit = sim_heap_take(&device->memory.small, units);
	if (sim_unlikely(!unit)) {
		if (!add_small_segment(device))
			return CUDA_ERROR_OUT_OF_MEMORY;
		unit = sim_heap_take(&device->memory.small, units);
	}
	unit->bytes = bytes;
	unit->used.owner = owner;
	unit->used.id = sim_next_id();
	*out = sim_unit_address(unit);
	return CUDA_SUCCESS;
}

struct sim_unit *sim_memory_unit_at(struct sim_device *device, CUdeviceptr address)
{
	enum sim_range_kind *at = granule_at(&device->memory.window, address);
	if (!at || *at != SIM_RANGE_SEGMENT)
		return NULL;
	struct sim_segment *segment = (struct sim_segment *)at;
	uint64_t offset = address - segment->base;
	struct sim_unit *unit = &segment->units[offset / SIM_UNIT_BYTES];
	return offset % SIM_UNIT_BYTES == 0 && unit->segment && sim_unit_in_use(unit) ? unit : NULL;
}

static void free_unit(struct sim_unit *unit)
{
	struct sim_segment *segment = unit->segment;
	unit->bytes = 0;
	unit = sim_heap_give(segment->heap, unit);
	if (unit->length == segment->n_units)
		retire_small_segment(segment);
}

/* ---- allocations of their own pages ---------------------------------------------------------------------------------- */

/* A description and addresses; the window's lock is held. */
static struct sim_large *large_place(struct sim_device *device, struct sim_window *window, enum sim_large_kind use, CUcontext owner,
				     uint64_t bytes)
{
	struct sim_large *large = window->spare_large;
	if (large)
		window->spare_large = large->next_spare;
	else
		large = malloc(sizeof *large);
	uint64_t granules = granules_for(bytes);
	struct sim_va_range *range = large ? va_take(window, granules) : NULL;
	if (!range) {
		free(large);
		return NULL;
	}
	*large = (struct sim_large){ .kind = SIM_RANGE_LARGE,
				     .use = use,
				     .device = device,
				     .window = window,
				     .range = range,
				     .base = range->base,
				     .bytes = bytes,
				     .granules = granules,
				     .owner = owner,
				     .id = sim_next_id(),
				     .preferred = CU_DEVICE_INVALID,
				     .accessed_by = CU_DEVICE_INVALID,
				     .prefetched = CU_DEVICE_INVALID };
	set_granules(window, large->base, granules, large);
	return large;
}

static void large_remove(struct sim_large *large)
{
	uint64_t bytes = large->granules * SIM_GRANULE_BYTES;
	set_granules(large->window, large->base, large->granules, NULL);
	if (large->shared.inode)
		stop_sharing(large->window, large->base, bytes, &large->shared);
	else if (large->touched)
		drop_pages(large->window, large->base, bytes);
	va_give(large->window, large->range);
	large->next_spare = large->window->spare_large;
	large->window->spare_large = large;
}

struct sim_large *sim_large_new(struct sim_device *device, enum sim_large_kind use, CUcontext owner, uint64_t bytes)
{
	pthread_mutex_lock(&device->memory.lock);
	struct sim_large *large = large_place(device, &device->memory.window, use, owner, bytes);
	pthread_mutex_unlock(&device->memory.lock);
	return large;
}

void sim_large_delete(struct sim_large *large)
{
	pthread_mutex_t *lock = large->window->lock;
	pthread_mutex_lock(lock);
	large_remove(large);
	pthread_mutex_unlock(lock);
}

static CUresult allocate_large(struct sim_device *device, CUcontext owner, uint64_t bytes, CUdeviceptr *out)
{
	uint64_t charged = granules_for(bytes) * SIM_GRANULE_BYTES;
	if (!charge_or_squeeze(device, charged))
		return CUDA_ERROR_OUT_OF_MEMORY;
	struct sim_large *large = large_place(device, &device->memory.window, SIM_LARGE_PLAIN, owner, bytes);
	if (!large) {
		sim_memory_uncharge(device, charged);
		return CUDA_ERROR_OUT_OF_MEMORY;
	}
	large->charged_bytes = charged;
	*out = large->base;
	return CUDA_SUCCESS;
}

CUresult sim_memory_allocate(struct sim_device *device, CUcontext owner, uint64_t bytes, CUdeviceptr *out)
{
	if (sim_unlikely(bytes > device->domain.capacity_bytes))
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&device->memory.lock);
	CUresult result = bytes <= SMALL_MAX_BYTES ? allocate_small(device, owner, bytes, out) : allocate_large(device, owner, bytes, out);
	pthread_mutex_unlock(&device->memory.lock);
	return result;
}

/* In a window that belongs to no device: the charge, if any, is taken first and under the device's own lock. */
static CUresult allocate_elsewhere(struct sim_window *window, struct sim_device *device, enum sim_large_kind use, CUcontext owner,
				   uint64_t bytes, uint64_t charged, CUdeviceptr *out)
{
	if (!window->bytes || bytes > window->bytes)
		return CUDA_ERROR_OUT_OF_MEMORY;
	pthread_mutex_lock(&device->memory.lock);
	bool taken = charge_or_squeeze(device, charged);
	pthread_mutex_lock(&space.lock);
	struct sim_large *large = taken ? large_place(device, window, use, owner, bytes) : NULL;
	if (large) {
		large->charged_bytes = charged;
		*out = large->base;
	}
	pthread_mutex_unlock(&space.lock);
	if (taken && !large)
		sim_memory_uncharge(device, charged);
	pthread_mutex_unlock(&device->memory.lock);
	return large ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult sim_memory_allocate_low(struct sim_device *device, CUcontext owner, uint64_t bytes, CUdeviceptr *out)
{
	return allocate_elsewhere(&space.low, device, SIM_LARGE_PLAIN, owner, bytes, granules_for(bytes) * SIM_GRANULE_BYTES, out);
}

_Atomic bool sim_managed_made;

CUresult sim_memory_allocate_managed(struct sim_device *device, CUcontext owner, uint64_t bytes, CUdeviceptr *out)
{
	atomic_store_explicit(&sim_managed_made, true, memory_order_relaxed);
	return allocate_elsewhere(&space.managed, device, SIM_LARGE_MANAGED, owner, bytes, 0, out);
}

/* ---- where managed pages lie ----------------------------------------------------------------------------------------- */

static pthread_mutex_t moving = PTHREAD_MUTEX_INITIALIZER;     /* before the lock of a device */

/* As with device memory, small blocks share a granule: one takes no more than its own units. */
static uint64_t page_bytes_of(const struct sim_large *managed)
{
	uint64_t units = (managed->bytes + SIM_UNIT_BYTES - 1) / SIM_UNIT_BYTES * SIM_UNIT_BYTES;

	return managed->bytes <= SMALL_MAX_BYTES ? units : SIM_GRANULE_BYTES;
}

/* How many pages of [first, last) would move there. */
static uint64_t pages_to_move(const struct sim_large *managed, uint64_t first, uint64_t last, uint8_t target)
{
	uint64_t count = 0;
	for (uint64_t i = first; i < last; i++)
		count += managed->pages[i] != target;
	return count;
}

static uint64_t charge_pages(struct sim_device *device, uint64_t pages, uint64_t page_bytes)
{
	pthread_mutex_lock(&device->memory.lock);
	while (pages && !sim_memory_charge(device, pages * page_bytes))
		pages /= 2;
	pthread_mutex_unlock(&device->memory.lock);
	return pages;
}

static void uncharge_pages(const uint64_t counts[SIM_MAX_GPUS + 1], uint64_t page_bytes)
{
	for (int i = 0; i < space.n_devices; i++) {
		if (!counts[i + 1])
			continue;
		pthread_mutex_lock(&space.devices[i].memory.lock);
		sim_memory_uncharge(&space.devices[i], counts[i + 1] * page_bytes);
		pthread_mutex_unlock(&space.devices[i].memory.lock);
	}
}

void sim_memory_move(struct sim_large *managed, uint64_t address, uint64_t bytes, struct sim_device *device)
{
	uint64_t first = (address - managed->base) / SIM_GRANULE_BYTES, left[SIM_MAX_GPUS + 1] = { 0 };
	uint64_t last = first + granules_for((address - managed->base) % SIM_GRANULE_BYTES + bytes);
	uint8_t target = device ? (uint8_t)(device - space.devices + 1) : 0;
	pthread_mutex_lock(&moving);
	if (!managed->pages)
		managed->pages = calloc(managed->granules, 1);
	uint64_t count = managed->pages ? pages_to_move(managed, first, last, target) : 0;
	if (device)
		count = charge_pages(device, count, page_bytes_of(managed));
	for (uint64_t i = first; i < last && count; i++) {
		if (managed->pages[i] == target)
			continue;
		left[managed->pages[i]]++;
		managed->pages[i] = target;
		count--;
	}
	pthread_mutex_unlock(&moving);
	uncharge_pages(left, page_bytes_of(managed));
}

/* Of memory that is gone from the tables. */
static void leave_devices(uint8_t *pages, uint64_t granules, uint64_t page_bytes)
{
	uint64_t left[SIM_MAX_GPUS + 1] = { 0 };
	for (uint64_t i = 0; pages && i < granules; i++)
		left[pages[i]]++;
	uncharge_pages(left, page_bytes);
	free(pages);
}

/* For a window without its own device. */
static CUresult free_elsewhere(struct sim_window *window, CUdeviceptr address)
{
	pthread_mutex_lock(&space.lock);
	struct sim_large *large = (struct sim_large *)granule_at(window, address);
	if (!large || large->base != address) {
		pthread_mutex_unlock(&space.lock);
		return CUDA_ERROR_INVALID_VALUE;
	}
	struct sim_device *device = large->device;
	uint64_t charged = large->charged_bytes, granules = large->granules, page_bytes = page_bytes_of(large);
	uint8_t *pages = large->pages;
	large->touched = true;      /* the CPU may have written to managed pages without a call */
	large_remove(large);
	pthread_mutex_unlock(&space.lock);
	pthread_mutex_lock(&device->memory.lock);
	sim_memory_uncharge(device, charged);
	pthread_mutex_unlock(&device->memory.lock);
	leave_devices(pages, granules, page_bytes);
	return CUDA_SUCCESS;
}

static CUresult free_large(struct sim_large *large)
{
	struct sim_device *device = large->device;
	if (large->use != SIM_LARGE_PLAIN)
		return CUDA_ERROR_INVALID_VALUE;
	/* a shared one counts in its entry, which large_remove leaves */
	uint64_t charged = large->shared.inode ? 0 : large->charged_bytes;
	large_remove(large);
	sim_memory_uncharge(device, charged);
	return CUDA_SUCCESS;
}

enum free_answer { FREED, NOT_OURS, BELONGS_TO_POOL, BELONGS_TO_GRAPH };

static enum free_answer free_in_device(struct sim_device *device, CUdeviceptr address)
{
	enum sim_range_kind *at = granule_at(&device->memory.window, address);
	if (!at)
		return NOT_OURS;
	if (*at == SIM_RANGE_SEGMENT) {
		struct sim_unit *unit = sim_memory_unit_at(device, address);
		if (!unit)
			return NOT_OURS;
		if (unit->segment->pool)
			return BELONGS_TO_POOL;
		free_unit(unit);
		return FREED;
	}
	struct sim_large *large = (struct sim_large *)at;
	if (*at != SIM_RANGE_LARGE || large->base != address)
		return NOT_OURS;
	if (large->use == SIM_LARGE_GRAPH)
		return BELONGS_TO_GRAPH;
	return free_large(large) == CUDA_SUCCESS ? FREED : NOT_OURS;
}

CUresult sim_memory_free(CUdeviceptr address)
{
	struct sim_device *device = sim_memory_device_of(address);
	if (sim_unlikely(!device)) {
		struct sim_window *window = sim_memory_window_of(address);
		return window ? free_elsewhere(window, address) : CUDA_ERROR_INVALID_VALUE;
	}
	pthread_mutex_lock(&device->memory.lock);
	enum free_answer answer = free_in_device(device, address);
	pthread_mutex_unlock(&device->memory.lock);
	switch (answer) {
	case FREED: return CUDA_SUCCESS;
	case BELONGS_TO_POOL: return sim_pool_free(address, NULL);
	case BELONGS_TO_GRAPH: return sim_graph_free_allocation(address);
	case NOT_OURS: break;
	}
	return CUDA_ERROR_INVALID_VALUE;
}

/* ---- everything a context leaves behind ------------------------------------------------------------------------------ */

/* Freeing merges chunks, but the length that stands at an old chunk border still leads to the next one, so the walk can go on. */
static void free_owned_units(struct sim_segment *segment, CUcontext owner)
{
	if (segment->pool)
		return;
	for (uint32_t i = 0; i < segment->n_units;) {
		struct sim_unit *unit = &segment->units[i];
		i += unit->length;
		if (!unit->bytes || unit->used.owner != owner)
			continue;
		free_unit(unit);
		if (segment->units[0].bytes == 0 && segment->units[0].length == segment->n_units)
			return;     /* retired */
	}
}

static void free_owned_in(struct sim_window *window, CUcontext owner)
{
	for (uint64_t i = 0; i < window->next_granule; i++) {
		enum sim_range_kind *at = (enum sim_range_kind *)window->granules[i];
		if (!at)
			continue;
		if (*at == SIM_RANGE_SEGMENT)
			free_owned_units((struct sim_segment *)at, owner);
		else if (*at == SIM_RANGE_LARGE && ((struct sim_large *)at)->owner == owner &&
			 ((struct sim_large *)at)->use == SIM_LARGE_PLAIN)
			free_large((struct sim_large *)at);
	}
}

/* The next allocation of `owner` in a window that has no device; 0 when there is no more. */
static CUdeviceptr owned_elsewhere(struct sim_window *window, CUcontext owner)
{
	CUdeviceptr address = 0;
	pthread_mutex_lock(&space.lock);
	for (uint64_t i = 0; i < window->next_granule && !address; i++) {
		struct sim_large *large = (struct sim_large *)window->granules[i];
		if (large && large->owner == owner)
			address = large->base;
	}
	pthread_mutex_unlock(&space.lock);
	return address;
}

void sim_memory_free_owned(struct sim_device *device, CUcontext owner)
{
	CUdeviceptr address;
	pthread_mutex_lock(&device->memory.lock);
	free_owned_in(&device->memory.window, owner);
	pthread_mutex_unlock(&device->memory.lock);
	while ((address = owned_elsewhere(&space.low, owner)))
		free_elsewhere(&space.low, address);
	while ((address = owned_elsewhere(&space.managed, owner)))
		free_elsewhere(&space.managed, address);
}

/* ---- reservations ---------------------------------------------------------------------------------------------------- */

struct sim_reservation *sim_reservation_new(struct sim_device *device, uint64_t bytes, uint64_t alignment)
{
	struct sim_window *window = &device->memory.window;
	uint64_t slack = alignment > SIM_GRANULE_BYTES ? alignment / SIM_GRANULE_BYTES - 1 : 0;
	uint64_t granules = bytes / SIM_GRANULE_BYTES;
	struct sim_reservation *reservation = calloc(1, sizeof *reservation);
	/* One entry per page, mapped rather than filled: reservations are far larger than what is mapped into them. */
	struct sim_mapping *mappings = map_table(granules * sizeof *mappings, granules * sizeof *mappings);
	pthread_mutex_lock(window->lock);
	struct sim_va_range *range = reservation && mappings ? va_take(window, granules + slack) : NULL;
	if (range) {
		uint64_t base = alignment ? (range->base + alignment - 1) / alignment * alignment : range->base;
		*reservation = (struct sim_reservation){ .kind = SIM_RANGE_RESERVATION,
							 .device = device,
							 .window = window,
							 .range = range,
							 .base = base,
							 .bytes = bytes,
							 .mappings = mappings };
		set_granules(window, base, granules, reservation);
	}
	pthread_mutex_unlock(window->lock);
	if (range)
		return reservation;
	if (mappings)
		unmap_table(mappings, granules * sizeof *mappings, granules * sizeof *mappings);
	free(reservation);
	return NULL;
}

struct sim_reservation *sim_reservation_at(const struct sim_window *window, CUdeviceptr address)
{
	enum sim_range_kind *at = granule_at(window, address);
	return at && *at == SIM_RANGE_RESERVATION ? (struct sim_reservation *)at : NULL;
}

void sim_reservation_delete(struct sim_reservation *reservation)
{
	uint64_t granules = reservation->bytes / SIM_GRANULE_BYTES;
	set_granules(reservation->window, reservation->base, granules, NULL);
	va_give(reservation->window, reservation->range);
	uint64_t table_bytes = granules * sizeof *reservation->mappings;
	unmap_table(reservation->mappings, table_bytes, table_bytes);
	free(reservation);
}

/* ---- looking up ------------------------------------------------------------------------------------------------------ */

/* The chunk in use around `address`. Most pointers are chunk starts, which are tried first. In a segment of small allocations it is else
 * found by walking from the segment's start: chunk starts are not marked inside free ones. */
static const struct sim_unit *unit_around(const struct sim_segment *segment, uint64_t address)
{
	uint32_t wanted = (uint32_t)((address - segment->base) / SIM_UNIT_BYTES);
	if (segment->units[wanted].segment && sim_unit_in_use(&segment->units[wanted]))
		return &segment->units[wanted];
	if (segment->pool)
		return sim_arena_chunk_around(segment, wanted);
	for (uint32_t i = 0; i < segment->n_units; i += segment->units[i].length)
		if (wanted - i < segment->units[i].length)
			return segment->units[i].bytes ? &segment->units[i] : NULL;
	return NULL;
}

static bool find_in_segment(struct sim_segment *segment, uint64_t address, struct sim_range *out)
{
	const struct sim_unit *unit = unit_around(segment, address);
	if (!unit || address - sim_unit_address(unit) >= unit->bytes)
		return false;
	*out = (struct sim_range){ .kind = SIM_RANGE_SEGMENT,
				   .device = segment->device,
				   .base = sim_unit_address(unit),
				   .bytes = unit->bytes,
				   .owner = unit->used.owner,
				   .pool = segment->pool,
				   .id = unit->used.id,
				   .mapped = true,
				   .access = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
				   .segment = segment };
	return true;
}

static bool find_in_large(struct sim_large *large, uint64_t address, struct sim_range *out)
{
	if (address - large->base >= large->bytes)
		return false;
	*out = (struct sim_range){ .kind = SIM_RANGE_LARGE,
				   .device = large->device,
				   .base = large->base,
				   .bytes = large->bytes,
				   .owner = large->owner,
				   .id = large->id,
				   .managed = large->use == SIM_LARGE_MANAGED,
				   .imported = large->use == SIM_LARGE_IMPORTED,
				   .mapped = true,
				   .access = CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
				   .large = large };
	return true;
}

static bool find_in_reservation(struct sim_reservation *reservation, uint64_t address, struct sim_range *out)
{
	const struct sim_mapping *mapping = &reservation->mappings[(address - reservation->base) / SIM_GRANULE_BYTES];
	*out = (struct sim_range){ .kind = SIM_RANGE_RESERVATION,
				   .device = reservation->device,
				   .base = reservation->base,
				   .bytes = reservation->bytes,
				   .reserved_base = reservation->base,
				   .reserved_bytes = reservation->bytes };
	if (mapping->physical) {
		out->device = mapping->physical->device ? mapping->physical->device : reservation->device;
		out->base = reservation->base + mapping->first * SIM_GRANULE_BYTES;
		out->bytes = mapping->pages * SIM_GRANULE_BYTES;
		out->mapped = true;
		out->physical = mapping->physical;
		out->access = mapping->access[out->device->ordinal];
		out->exportable = mapping->physical->properties.requestedHandleTypes & CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
		out->id = (uint64_t)(uintptr_t)mapping->physical;
	}
	return true;
}

static bool find_locked(struct sim_window *window, uint64_t address, struct sim_range *out)
{
	enum sim_range_kind *at = granule_at(window, address);
	if (!at)
		return false;
	switch (*at) {
	case SIM_RANGE_SEGMENT: return find_in_segment((struct sim_segment *)at, address, out);
	case SIM_RANGE_LARGE: return find_in_large((struct sim_large *)at, address, out);
	case SIM_RANGE_RESERVATION: return find_in_reservation((struct sim_reservation *)at, address, out);
	}
	return false;
}

bool sim_memory_find(CUdeviceptr address, struct sim_range *out)
{
	struct sim_window *window = sim_memory_window_of(address);
	if (!window)
		return false;
	pthread_mutex_lock(window->lock);
	bool found = find_locked(window, address, out);
	pthread_mutex_unlock(window->lock);
	return found;
}

/* Neighbouring pages of a reservation may be mapped by different calls; a copy over all of them is fine when each may be used. */
static bool reservation_usable(const struct sim_reservation *reservation, uint64_t address, uint64_t bytes,
			       const struct sim_device *accessor)
{
	uint64_t first = (address - reservation->base) / SIM_GRANULE_BYTES,
		 last = (address - reservation->base + bytes - 1) / SIM_GRANULE_BYTES;
	if (last >= reservation->bytes / SIM_GRANULE_BYTES)
		return false;
	for (uint64_t i = first; i <= last; i++) {
		const struct sim_mapping *mapping = &reservation->mappings[i];
		if (!mapping->physical || (mapping->access[reservation->device->ordinal] == 0 && mapping->access[accessor->ordinal] == 0))
			return false;
	}
	return true;
}

static bool usable_locked(struct sim_window *window, uint64_t address, uint64_t bytes, const struct sim_device *accessor)
{
	enum sim_range_kind *at = granule_at(window, address);
	struct sim_range range;
	if (at && *at == SIM_RANGE_RESERVATION)
		return reservation_usable((struct sim_reservation *)at, address, bytes, accessor);
	if (!at || !find_locked(window, address, &range) || bytes > range.base + range.bytes - address)
		return false;
	if (range.segment)
		range.segment->touched = true;
	else
		range.large->touched = true;
	return true;
}

void *sim_memory_bytes(CUdeviceptr address, uint64_t bytes, const struct sim_device *accessor)
{
	struct sim_window *window = sim_memory_window_of(address);
	if (!window)
		return NULL;
	pthread_mutex_lock(window->lock);
	bool usable = usable_locked(window, address, bytes ? bytes : 1, accessor);
	pthread_mutex_unlock(window->lock);
	return usable ? sim_shadow(window, address) : NULL;
}
