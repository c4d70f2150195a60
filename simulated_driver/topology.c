/* SPDX-License-Identifier: Apache-2.0 */
/* topology.c - queries on a topology, and the spelling of its names. Reading: topology_parse.c. */
#include "simulated_driver/topology.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "nvml_abi.h"

bool sim_topology_set_driver(struct sim_topology *topology, const char *version)
{
	unsigned major, minor, patch = 0;
	char extra;
	int fields = sscanf(version, "%u.%u.%u%c", &major, &minor, &patch, &extra);
	if (fields < 2 || fields > 3 || strlen(version) + 4 > SIM_VERSION_LEN)
		return false;
	snprintf(topology->driver_version, sizeof topology->driver_version, "%s", version);
	snprintf(topology->nvml_version, sizeof topology->nvml_version, "%u.%.27s", (unsigned)(topology->cuda_version / 1000), version);
	return true;
}

/* The branch of each CUDA release, from NVIDIA's release notes of the CUDA toolkit; a branch between two has the older one's. */
static const struct {
	unsigned driver;
	int32_t cuda;
} releases[] = {
	{ 440, 10020 }, { 450, 11000 }, { 455, 11010 }, { 460, 11020 }, { 465, 11030 }, { 470, 11040 }, { 495, 11050 },
	{ 510, 11060 }, { 515, 11070 }, { 520, 11080 }, { 525, 12000 }, { 530, 12010 }, { 535, 12020 }, { 545, 12030 },
	{ 550, 12040 }, { 555, 12050 }, { 560, 12060 }, { 565, 12070 }, { 570, 12080 }, { 575, 12090 }, { 580, 13000 },
	{ 590, 13010 }, { 595, 13020 }, { 610, 13030 }, { 615, 13040 },
};

int32_t sim_topology_cuda_of_driver(const char *version)
{
	unsigned long branch = strtoul(version, NULL, 10);
	int32_t cuda = 0;
	for (size_t i = 0; i < sizeof releases / sizeof *releases && releases[i].driver <= branch; i++)
		cuda = releases[i].cuda;
	return cuda;
}

/* ---- questions ---- */

unsigned sim_topology_driver_major(const struct sim_topology *topology)
{
	return (unsigned)strtoul(topology->driver_version, NULL, 10);
}

unsigned sim_topology_common_ancestor(const struct sim_gpu *a, const struct sim_gpu *b)
{
	if (a->minor == b->minor)
		return NVML_TOPOLOGY_INTERNAL;
	if (a->numa_node != b->numa_node)
		return NVML_TOPOLOGY_SYSTEM;
	if (a->host_bridge != b->host_bridge)
		return NVML_TOPOLOGY_NODE;
	if (a->root_port != b->root_port)
		return NVML_TOPOLOGY_HOSTBRIDGE;
	return a->pcie_switch == b->pcie_switch ? NVML_TOPOLOGY_SINGLE : NVML_TOPOLOGY_MULTIPLE;
}

static unsigned links_to(const struct sim_gpu *gpu, uint32_t kind, uint32_t peer)
{
	unsigned count = 0;
	for (uint32_t l = 0; l < gpu->nvlink_count; l++)
		count += gpu->nvlinks[l].peer_kind == kind && gpu->nvlinks[l].peer == peer;
	return count;
}

unsigned sim_topology_nvlinks_between(const struct sim_topology *topology, const struct sim_gpu *a, const struct sim_gpu *b)
{
	if (a->minor == b->minor)
		return 0;
	unsigned count = links_to(a, SIM_LINK_GPU, b->minor);
	for (uint32_t s = 0; s < topology->n_switches; s++) {
		unsigned from_a = links_to(a, SIM_LINK_SWITCH, s), from_b = links_to(b, SIM_LINK_SWITCH, s);
		count += from_a < from_b ? from_a : from_b;
	}
	return count;
}

/* ---- text ---- */

void sim_format_pci_address(const struct sim_pci_address *address, char *buffer, size_t size)
{
	snprintf(buffer, size, "%08X:%02X:%02X.0", address->domain, address->bus, address->device);
}

/* FNV-1a, then a finalizer so that seeds which differ in one digit differ everywhere. */
static uint64_t hash_text(const char *text, uint64_t hash)
{
	for (; *text; text++)
		hash = (hash ^ (uint8_t)*text) * 0x100000001b3ull;
	hash = (hash ^ hash >> 30) * 0xbf58476d1ce4e5b9ull;
	hash = (hash ^ hash >> 27) * 0x94d049bb133111ebull;
	return hash ^ hash >> 31;
}

void sim_format_seeded_uuid(const char *prefix, const char *seed, char out[SIM_UUID_LEN])
{
	unsigned long long high = hash_text(seed, 0xcbf29ce484222325ull), low = hash_text(seed, 0x84222325cbf29ce4ull);
	snprintf(out, SIM_UUID_LEN, "%.5s%08llx-%04llx-%04llx-%04llx-%012llx", prefix, high >> 32, high >> 16 & 0xffff, high & 0xffff,
		 low >> 48, low & 0xffffffffffffull);
}
