/* SPDX-License-Identifier: Apache-2.0 */
/* The memory of code, by measurement.
 *
 * Free device memory is compared before and after a call that may load: what is missing belongs to the code, to another allocation, or to
 * a neighbour. Where the driver lists this process (NVML), the shim tells them apart: it takes the driver's figure less all charges, and
 * compares that with the same difference before the first load. Where the driver does not list it, or the process is now charged for more
 * than it holds (managed memory that is not on the device), the shim subtracts what the container was charged meanwhile, and of the rest
 * accepts at most the size of the image; a large rest is tested by unloading the module (module.c). So modules are charged at once, as the
 * limit needs, even if neighbours grow many times meanwhile. The agent's overhead figure covers what an image does not show (code that is
 * compressed or compiled). A call that loads later has no image, and is charged all that is missing then: it is short, and nothing bounds
 * what it loads.
 *
 * NVML costs the driver up to milliseconds, so it is queried only when free device memory shrank at all. */
#include "interpose/code.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "account/map.h"
#include "interpose/driver.h"
#include "interpose/measure.h"
#include "interpose/relax.h"
#include "shim.h"

#define PAGE_BYTES ((uint64_t)2 << 20) /* of device memory */
#define ASK_AGAIN_NS 100000000u
#define FEW_LOOKS 3
#define MANY_LOOKS 12
#define LOOK_AGAIN_NS 1000000
#define NO_OWNER UINT64_MAX            /* code of several contexts: it stays charged until it is unloaded */

/* Charged code, by the handle it is unloaded with and the device. */
static struct aq_map charged;

/* Held while NVML is queried and growth is charged, so that no two threads charge the same bytes. Never held across a CUDA call (latch.h),
 * and so never while memory is reclaimed. */
static pthread_mutex_t measuring = PTHREAD_MUTEX_INITIALIZER;

/* The driver's count of this process less what is charged, before the first load since its newest context. */
static struct {
	bool known;
	_Atomic uint64_t asked_ns; /* when NVML was asked for it last; 0 = not yet */
	int64_t uncharged_bytes;
} baselines[AQ_MAX_DEVICES];

/* Of the loads that were charged by what is likely, since the newest context: the images, and what was charged for them. Under the gate. */
static struct {
	uint64_t image_bytes;
	uint64_t charged_bytes;
} believed[AQ_MAX_DEVICES];

/* ---- measuring ------------------------------------------------------------------------------------------------- */

static uint64_t least(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

CUresult aq_code_look(int device, struct aq_moment *moment)
{
	size_t free_bytes = 0, total_bytes;

	moment->container_bytes = aq_account_container_bytes(device);
	CUstreamCaptureMode mode = aq_relax();
	CUresult result = aq_cuda.cuMemGetInfo_v2(&free_bytes, &total_bytes);
	aq_restrict(mode);
	moment->free_bytes = free_bytes;
	return result;
}

/* What the driver counts for this process beyond its charges. False when the driver does not list the process. With the gate held. */
static bool uncharged_bytes(int device, int64_t *bytes)
{
	/* Memory that another thread takes or gives back meanwhile must not look like growth: the larger charge counts. */
	uint64_t before = aq_account_own_bytes(device);
	uint64_t own = aq_measure(aq_account_region(), aq_device_uuid(device), device).own_bytes;
	uint64_t after = aq_account_own_bytes(device);

	*bytes = (int64_t)(own - (before > after ? before : after));
	return own != 0;
}

/* The same while other threads take memory or give it back: what they do at that moment only makes the figure smaller, so the largest of
 * several counts. Less than `expected` is believed after more of them. With the gate held. */
static bool settled_uncharged_bytes(int device, int64_t expected, int64_t *bytes)
{
	const struct timespec pause = { .tv_nsec = LOOK_AGAIN_NS };
	int64_t now;

	*bytes = INT64_MIN;
	for (int looks = 0; looks < FEW_LOOKS || (*bytes < expected && looks < MANY_LOOKS); looks++) {
		if (looks >= FEW_LOOKS)
			nanosleep(&pause, NULL);
		if (!uncharged_bytes(device, &now))
			return false;
		*bytes = now > *bytes ? now : *bytes;
	}
	return true;
}

/* A program may ask for thousands of functions, and NVML may not list the process, or not yet. */
static bool asked_just_now(int device)
{
	struct timespec time;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &time);
	uint64_t now = (uint64_t)time.tv_sec * 1000000000u + (uint64_t)time.tv_nsec;
	uint64_t asked = atomic_load_explicit(&baselines[device].asked_ns, memory_order_relaxed);
	if (asked && now - asked < ASK_AGAIN_NS)
		return true;
	atomic_store_explicit(&baselines[device].asked_ns, now, memory_order_relaxed);
	return false;
}

void aq_code_learn_baseline(int device)
{
	if (asked_just_now(device))
		return;
	aq_measure_open();
	pthread_mutex_lock(&measuring);
	if (!baselines[device].known)
		baselines[device].known = settled_uncharged_bytes(device, INT64_MIN, &baselines[device].uncharged_bytes);
	pthread_mutex_unlock(&measuring);
}

static uint64_t whole_pages(uint64_t bytes)
{
	return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

/* What a load may have taken by the size of its image, small ones sharing pages. With the gate held, once for a load. */
static uint64_t expected_bytes(uint64_t image_bytes, int device)
{
	if (image_bytes == AQ_NO_IMAGE)
		return UINT64_MAX;
	believed[device].image_bytes += image_bytes;
	return least(whole_pages(image_bytes), whole_pages(believed[device].image_bytes) - believed[device].charged_bytes);
}

/* How much of the missing memory to accept when the driver does not report the owner. */
static uint64_t likely_ours(uint64_t image_bytes, int device, uint64_t lost, const struct aq_moment *before, uint64_t *doubt)
{
	uint64_t now = aq_account_container_bytes(device); /* with what another load was charged a moment ago */
	uint64_t others = now > before->container_bytes ? now - before->container_bytes : 0;
	uint64_t unexplained = lost > others ? lost - others : 0, likely = least(unexplained, expected_bytes(image_bytes, device));

	*doubt = unexplained - likely;
	if (image_bytes != AQ_NO_IMAGE)
		believed[device].charged_bytes += likely;
	return likely;
}

/* Of what the device lost since `before`: what this process took for this load, and was not charged for. With the gate held. */
static uint64_t growth_of(uint64_t image_bytes, int device, uint64_t lost, const struct aq_moment *before, uint64_t *doubt)
{
	int64_t uncharged;

	if (!baselines[device].known || !uncharged_bytes(device, &uncharged))
		return likely_ours(image_bytes, device, lost, before, doubt);
	int64_t own = uncharged - baselines[device].uncharged_bytes;
	/* Less than is uncharged may have been lost around this call: the rest is another thread's, which is about to look. */
	return own >= 0 ? least(lost, (uint64_t)own) : likely_ours(image_bytes, device, lost, before, doubt);
}

static void set_baseline_unknown(int device)
{
	if (device < 0)
		return;
	pthread_mutex_lock(&measuring);
	baselines[device].known = false;
	atomic_store(&baselines[device].asked_ns, 0);
	believed[device].image_bytes = believed[device].charged_bytes = 0;
	pthread_mutex_unlock(&measuring);
}

/* ---- charging -------------------------------------------------------------------------------------------------- */

/* The handle is an address, so its high byte is free for the device. */
static uint64_t key_of(uint64_t handle, int device)
{
	return handle | (uint64_t)(device + 1) << 56;
}

/* Charge what was taken, past the limit if necessary, because another thread that measures must not find it uncharged. True when it
 * fits. */
static bool charge_measured(uint64_t image_bytes, int device, uint64_t lost, const struct aq_moment *before, struct aq_code_growth *growth)
{
	pthread_mutex_lock(&measuring);
	growth->bytes = growth_of(image_bytes, device, lost, before, &growth->doubt_bytes);
	bool fits = aq_charge_quick(device, AQ_MODULE, growth->bytes);
	if (!fits)
		aq_charge_taken(device, AQ_MODULE, growth->bytes);
	pthread_mutex_unlock(&measuring);
	return fits;
}

/* May what was charged past the limit stay, after memory was taken back? It stays charged in any case. */
static bool charge_again(int device, uint64_t bytes)
{
	aq_reclaim(device);
	pthread_mutex_lock(&measuring);
	aq_uncharge(device, AQ_MODULE, bytes);
	bool fits = aq_charge_quick(device, AQ_MODULE, bytes);
	if (!fits)
		aq_charge_taken(device, AQ_MODULE, bytes);
	pthread_mutex_unlock(&measuring);
	if (!fits)
		aq_refused(device, bytes);
	return fits;
}

enum aq_code_fit aq_code_charge(uint64_t image_bytes, int device, const struct aq_moment *before, struct aq_code_growth *growth)
{
	struct aq_moment now;
	uint64_t lost = UINT64_MAX;

	*growth = (struct aq_code_growth){ 0 };
	bool known = aq_code_look(device, &now) == CUDA_SUCCESS;
	if (!known && !baselines[device].known)
		return AQ_CODE_UNKNOWN;
	if (known && now.free_bytes >= before->free_bytes)
		return AQ_CODE_FITS;
	if (known)
		lost = before->free_bytes - now.free_bytes;
	bool fits = charge_measured(image_bytes, device, lost, before, growth) || charge_again(device, growth->bytes);
	if (!known)
		return AQ_CODE_UNKNOWN;
	return fits ? AQ_CODE_FITS : AQ_CODE_TOO_LARGE;
}

bool aq_code_hold(uint64_t handle, const struct aq_place *place, uint64_t bytes)
{
	struct aq_entry held = { .key = key_of(handle, place->device), .owner = place->owner };

	if (!bytes)
		return true;
	pthread_mutex_lock(&measuring);
	aq_map_get(&charged, held.key, &held);
	held.bytes += bytes;
	held.owner = held.owner == place->owner ? place->owner : NO_OWNER;
	held.device = (uint32_t)place->device;
	held.kind = AQ_MODULE;
	bool recorded = aq_map_put(&charged, &held);
	pthread_mutex_unlock(&measuring);
	return recorded;
}

/* ---- what contexts keep ---------------------------------------------------------------------------------------- */

/* The first code that calls malloc or printf on the device brings a heap and a buffer to its context, which keeps them when that code is
 * unloaded (8 MiB and 1 MiB are documented, and drivers may take more). The same holds for the rest of a page, while other code lies there.
 * They are charged under a handle of their own, until they come back or the context ends.
 *
 * What is kept is not what a call gave back, which other threads and neighbours would blur, but what the driver now counts for this process
 * beyond its other charges. So each unload sets it again. Where the driver does not list the process, nothing is kept. */
#define KEPT_MOST_BYTES ((int64_t)16 << 20)

static _Atomic bool keeps; /* some context does, or did */

static uint64_t kept_key(const struct aq_place *place)
{
	return key_of(place->owner | 1, place->device); /* no address is odd */
}

/* Of `all` bytes, which are still charged: what the driver holds. `kept`: the same before this. With the gate held. */
static uint64_t still_held(int device, int64_t kept, int64_t all)
{
	int64_t base = baselines[device].uncharged_bytes - all, uncharged;

	if (!baselines[device].known || !settled_uncharged_bytes(device, base + kept, &uncharged))
		return (uint64_t)kept;
	int64_t held = uncharged - base, most = all < KEPT_MOST_BYTES ? all : KEPT_MOST_BYTES;
	return (uint64_t)(held < 0 ? 0 : held > most ? most : held);
}

void aq_code_give_back(const struct aq_place *place, uint64_t bytes)
{
	struct aq_entry kept = { .key = 0 };

	aq_measure_open();
	pthread_mutex_lock(&measuring);
	uint64_t before = aq_map_take(&charged, kept_key(place), &kept) ? kept.bytes : 0, all = before + bytes;
	kept = (struct aq_entry){ .key = kept_key(place), .owner = place->owner, .device = (uint32_t)place->device, .kind = AQ_MODULE };
	kept.bytes = all ? still_held(place->device, (int64_t)before, (int64_t)all) : 0;
	aq_uncharge(place->device, AQ_MODULE, all - kept.bytes);
	if (kept.bytes)
		aq_map_put(&charged, &kept); /* without memory to record it, charged until the process ends */
	atomic_store_explicit(&keeps, keeps || kept.bytes, memory_order_relaxed);
	pthread_mutex_unlock(&measuring);
}

/* ---- unloading ------------------------------------------------------------------------------------------------- */

void aq_code_unloading(uint64_t handle, struct aq_code_held *held)
{
	struct aq_place current;

	for (int device = 0; device < AQ_MAX_DEVICES; device++)
		if (aq_map_take(&charged, key_of(handle, device), &held->entry[device]))
			aq_code_learn_baseline(device);
		else
			held->entry[device].key = 0;
	bool is_here = aq_place_current(&current) && current.device >= 0 && held->entry[current.device].key;
	held->device = is_here && aq_code_look(current.device, &held->before) == CUDA_SUCCESS ? current.device : AQ_NO_DEVICE;
}

/* Without a look at the process, which costs much more: the device has gained just what was charged, so nothing was kept. */
static bool came_back(const struct aq_code_held *held, const struct aq_entry *entry)
{
	struct aq_moment now;

	return (int)entry->device == held->device && !atomic_load_explicit(&keeps, memory_order_relaxed) &&
	       aq_code_look(held->device, &now) == CUDA_SUCCESS && now.free_bytes - held->before.free_bytes == entry->bytes;
}

/* Code that was charged with other code is not in the records, and its memory may be what the context keeps. */
static void unloaded_unknown(void)
{
	struct aq_place place;

	if (atomic_load_explicit(&keeps, memory_order_relaxed) && aq_place_current(&place) && place.device >= 0)
		aq_code_give_back(&place, 0);
}

static void unloaded_known(const struct aq_entry *entry)
{
	struct aq_place current, place = { .device = (int)entry->device, .owner = entry->owner };

	if (place.owner == NO_OWNER)
		place.owner = aq_place_current(&current) && current.device == place.device ? current.owner : 0;
	aq_code_give_back(&place, entry->bytes);
}

void aq_code_unloaded(const struct aq_code_held *held, bool unloaded)
{
	bool is_known = false;

	for (int device = 0; device < AQ_MAX_DEVICES; device++) {
		if (!held->entry[device].key)
			continue;
		is_known = true;
		if (unloaded && came_back(held, &held->entry[device]))
			aq_uncharge(device, AQ_MODULE, held->entry[device].bytes);
		else if (unloaded)
			unloaded_known(&held->entry[device]);
		else
			aq_map_put(&charged, &held->entry[device]);
	}
	if (unloaded && !is_known)
		unloaded_unknown();
}

/* ---- contexts -------------------------------------------------------------------------------------------------- */

struct owner {
	int device;
	uint64_t owner;
};

static bool belongs_to(const struct aq_entry *entry, void *context)
{
	const struct owner *owner = context;

	return (int)entry->device == owner->device && entry->owner == owner->owner;
}

static void credit(const struct aq_entry *entry, void *context)
{
	(void)context;
	aq_uncharge((int)entry->device, AQ_MODULE, entry->bytes);
}

void aq_code_context_begun(int device)
{
	set_baseline_unknown(device);
}

void aq_code_context_gone(int device, uint64_t owner)
{
	struct owner ended = { device, owner };

	aq_map_drain(&charged, belongs_to, credit, &ended);
	set_baseline_unknown(device);
}

void aq_code_forget(void)
{
	pthread_mutex_init(&measuring, NULL);
	aq_map_forget(&charged);
	for (int device = 0; device < AQ_MAX_DEVICES; device++) {
		baselines[device].known = false;
		atomic_store(&baselines[device].asked_ns, 0);
	}
	memset(believed, 0, sizeof(believed));
	atomic_store(&keeps, false);
}
