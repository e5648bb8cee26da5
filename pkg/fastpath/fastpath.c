//go:build ignore

// The tcx program of package fastpath. It forwards a packet of a VIP to the target that nftables
// would select, or returns TCX_NEXT: nftables then handles the packet, with every special case.
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/ipv6.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

// As in <linux/bpf.h> of Linux 6.6.
#define TCX_NEXT -1
#define TCX_DROP 2

#define IPV4_FRAGMENT 0x3fff // more fragments, offset
#define SCTP 132
#define TCP_HEADER_LENGTH 12 // offset of the byte with the data offset
#define TCP_FLAGS 13
#define TCP_SYN 0x02
#define SCTP_CHUNK 12 // offset of the type of the first chunk
#define SCTP_INIT 1

// Code points of pkg/returning: nftables finds the target of a returned packet.
#define ASK 0x03
#define RETURNED 0x13
#define RETURNED_MASK 0x33

// ASKS is set in an entry of a Maglev table if packets that may belong to an earlier flow are marked
// with ASK.
#define ASKS 0x80000000

// record describes one family of a stream. Only size changes while packets read it: 0 suspends the
// stream. Only then match may change.
struct record {
	__u32 offset; // of the Maglev table in tables
	__u32 size;   // of the Maglev table
	__u32 seed;
	__u32 match; // whether only the ports in the map ports are forwarded
};

// hop is a next hop on a link, whose MTU it holds. It never changes.
struct hop {
	struct bpf_redir_neigh neighbor;
	__u32 link;
	__u32 mtu;
};

struct port {
	__u32 record;
	__u16 number; // big endian
	__u8 protocol;
	__u8 zero;
};

struct counter {
	__u64 packets;
	__u64 bytes;
};

struct address {
	__u32 words[4];
};

// The sizes of all maps are set when the program is loaded.
#define MAP(name, kind, key_type, value_type)                                                      \
	struct {                                                                                       \
		__uint(type, kind);                                                                        \
		__type(key, key_type);                                                                     \
		__type(value, value_type);                                                                 \
		__uint(max_entries, 1);                                                                    \
	} name SEC(".maps")

MAP(vips4, BPF_MAP_TYPE_HASH, __u32, __u32);             // VIP to record
MAP(vips6, BPF_MAP_TYPE_HASH, struct address, __u32);    // VIP to record
MAP(records, BPF_MAP_TYPE_ARRAY, __u32, struct record);  // each family of each stream
MAP(tables, BPF_MAP_TYPE_ARRAY, __u32, __u32);           // Maglev tables: hop of a hash and ASKS, 0 without
MAP(ports, BPF_MAP_TYPE_HASH, struct port, __u8);        // forwarded ports of records with a match
MAP(hops, BPF_MAP_TYPE_ARRAY, __u32, struct hop);        // 0 is unused
MAP(counters, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, struct counter); // by hop

static __always_inline __u32 rotate(__u32 word, int by)
{
	return word << by | word >> (32 - by);
}

// mix and last are __jhash_mix and __jhash_final of include/linux/jhash.h.
static __always_inline void mix(__u32 *a, __u32 *b, __u32 *c)
{
	*a -= *c; *a ^= rotate(*c, 4); *c += *b;
	*b -= *a; *b ^= rotate(*a, 6); *a += *c;
	*c -= *b; *c ^= rotate(*b, 8); *b += *a;
	*a -= *c; *a ^= rotate(*c, 16); *c += *b;
	*b -= *a; *b ^= rotate(*a, 19); *a += *c;
	*c -= *b; *c ^= rotate(*b, 4); *b += *a;
}

static __always_inline __u32 last(__u32 a, __u32 b, __u32 c)
{
	c ^= b; c -= rotate(b, 14);
	a ^= c; a -= rotate(c, 11);
	b ^= a; b -= rotate(a, 25);
	c ^= b; c -= rotate(b, 16);
	a ^= c; a -= rotate(c, 4);
	b ^= a; b -= rotate(a, 14);
	c ^= b; c -= rotate(b, 24);
	return c;
}

// packet holds the parsed headers.
struct packet {
	__u32 source[4];
	__u32 destination[4];
	__u32 ports; // both, as in the packet
	__u32 length;  // in the IP header: the frame may have padding
	__u32 headers; // length of IP and transport header
	__u8 protocol;
	__u8 later; // a TCP segment without SYN, or an SCTP packet without INIT
};

// start returns the initial value of a hash over words registers of nftables.
static __always_inline __u32 start(__u32 words, __u32 seed)
{
	return 0xdeadbeef + 4 * words + seed;
}

// hash4 and hash6 compute "jhash" of nftables over addresses, protocol and ports, each in
// registers of 32 bits that are padded with zeros.
static __always_inline __u32 hash4(const struct packet *packet, __u32 seed)
{
	__u32 a = start(5, seed), b = a, c = a;

	a += packet->source[0];
	b += packet->destination[0];
	c += packet->protocol;
	mix(&a, &b, &c);
	return last(a + (packet->ports & 0xffff), b + (packet->ports >> 16), c);
}

static __always_inline __u32 hash6(const struct packet *packet, __u32 seed)
{
	__u32 a = start(11, seed), b = a, c = a;

	a += packet->source[0];
	b += packet->source[1];
	c += packet->source[2];
	mix(&a, &b, &c);
	a += packet->source[3];
	b += packet->destination[0];
	c += packet->destination[1];
	mix(&a, &b, &c);
	a += packet->destination[2];
	b += packet->destination[3];
	c += packet->protocol;
	mix(&a, &b, &c);
	return last(a + (packet->ports & 0xffff), b + (packet->ports >> 16), c);
}

// transport reads the ports and adds the length of the transport header.
static __always_inline int transport(struct __sk_buff *skb, struct packet *packet)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	__u8 *header = data + ETH_HLEN + packet->headers;

	if ((void *)(header + 8) > end || packet->headers + 8 > packet->length)
		return 0;
	packet->ports = *(__u32 *)header;
	switch (packet->protocol) {
	case IPPROTO_TCP:
		if ((void *)(header + 20) > end || packet->headers + 20 > packet->length)
			return 0;
		packet->headers += header[TCP_HEADER_LENGTH] >> 4 << 2;
		packet->later = !(header[TCP_FLAGS] & TCP_SYN);
		return 1;
	case SCTP:
		if ((void *)(header + 16) > end || packet->headers + 16 > packet->length)
			return 0;
		packet->headers += 12;
		packet->later = header[SCTP_CHUNK] != SCTP_INIT;
		return 1;
	case IPPROTO_UDP:
		packet->headers += 8;
		return 1;
	}
	return 0;
}

// fits reports whether the packet, or each segment of it, is within the MTU of a hop. The stack
// sends ICMP errors for larger packets, or fragments them.
static __always_inline int fits(struct __sk_buff *skb, const struct packet *packet, const struct hop *hop)
{
	__u32 length = skb->gso_size ? skb->gso_size + packet->headers : packet->length;

	return length <= hop->mtu;
}

// returned reports whether a target may have returned a packet with these services.
static __always_inline int returned(const struct packet *packet, __u32 services)
{
	return packet->later && (services & RETURNED_MASK) == RETURNED;
}

// select returns the hop of the packet with ASKS, or 0 if nftables forwards it.
static __always_inline __u32 select(const struct packet *packet, __u32 index, int family)
{
	struct record *record = bpf_map_lookup_elem(&records, &index);
	__u32 size, entry, *hop;

	if (!record)
		return 0;
	size = *(volatile __u32 *)&record->size; // read once: it may become 0
	if (!size)
		return 0;
	if (record->match) {
		struct port port = { index, packet->ports >> 16, packet->protocol, 0 };

		if (!bpf_map_lookup_elem(&ports, &port))
			return 0;
	}
	entry = family == 4 ? hash4(packet, record->seed) : hash6(packet, record->seed);
	entry = record->offset + (__u32)((__u64)entry * size >> 32);
	hop = bpf_map_lookup_elem(&tables, &entry);
	return hop ? *hop : 0;
}

// forwardable returns the hop of the packet if it fits the link, or 0.
static __always_inline struct hop *forwardable(struct __sk_buff *skb, const struct packet *packet, __u32 index)
{
	struct hop *hop;

	index &= ~ASKS;
	hop = index ? bpf_map_lookup_elem(&hops, &index) : 0;
	return hop && fits(skb, packet, hop) ? hop : 0;
}

static __always_inline int redirect(const struct packet *packet, struct hop *hop, __u32 index)
{
	struct counter *counter;

	index &= ~ASKS;
	counter = bpf_map_lookup_elem(&counters, &index);
	if (counter) {
		counter->packets++;
		counter->bytes += packet->length;
	}
	return bpf_redirect_neigh(hop->link, &hop->neighbor, sizeof(hop->neighbor), 0);
}

static __always_inline int ipv4(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct iphdr *ip = data + ETH_HLEN;
	struct packet packet = {};
	struct hop *hop;
	__u32 *record, index;
	__u16 before, after, length, services, ask;
	__u8 first;

	if ((void *)(ip + 1) > end)
		return TCX_NEXT;
	record = bpf_map_lookup_elem(&vips4, &ip->daddr);
	if (!record)
		return TCX_NEXT;
	length = bpf_ntohs(ip->tot_len);
	first = bpf_ntohl(ip->saddr) >> 24;
	// The stack drops packets from loopback, multicast and reserved sources and truncated packets, and
	// answers expired ones.
	if (*(__u8 *)ip != 0x45 || ip->ttl <= 1 || ip->frag_off & bpf_htons(IPV4_FRAGMENT) ||
	    length < sizeof(*ip) || length + ETH_HLEN > skb->len || !first || first == 127 || first >= 224)
		return TCX_NEXT;
	packet.source[0] = ip->saddr;
	packet.destination[0] = ip->daddr;
	packet.protocol = ip->protocol;
	packet.headers = sizeof(*ip);
	packet.length = length;
	if (!transport(skb, &packet) || returned(&packet, ip->tos >> 2))
		return TCX_NEXT;
	index = select(&packet, *record, 4);
	hop = forwardable(skb, &packet, index);
	if (!hop)
		return TCX_NEXT;
	// The words of version, length and services before and after.
	services = *(__u16 *)ip;
	ask = (services & bpf_htons(0xff03)) | bpf_htons(ASK << 2);
	// The words of TTL and protocol before and after.
	before = *(__u16 *)&ip->ttl;
	after = before - bpf_htons(0x0100);
	if (bpf_l3_csum_replace(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, check), before, after, 2) ||
	    bpf_skb_store_bytes(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, ttl), &after, 2, 0))
		return TCX_DROP; // never: the header is linear
	if (index & ASKS && packet.later &&
	    (bpf_l3_csum_replace(skb, ETH_HLEN + __builtin_offsetof(struct iphdr, check), services, ask, 2) ||
	     bpf_skb_store_bytes(skb, ETH_HLEN, &ask, 2, 0)))
		return TCX_DROP;
	return redirect(&packet, hop, index);
}

static __always_inline int ipv6(struct __sk_buff *skb)
{
	void *data = (void *)(long)skb->data, *end = (void *)(long)skb->data_end;
	struct ipv6hdr *ip = data + ETH_HLEN;
	struct packet packet = {};
	struct address destination;
	struct hop *hop;
	__u32 *record, index, first, length;
	__u16 services;
	__u8 limit;

	if ((void *)(ip + 1) > end)
		return TCX_NEXT;
	__builtin_memcpy(&destination, &ip->daddr, sizeof(destination));
	record = bpf_map_lookup_elem(&vips6, &destination);
	if (!record)
		return TCX_NEXT;
	__builtin_memcpy(packet.source, &ip->saddr, sizeof(packet.source));
	__builtin_memcpy(packet.destination, &ip->daddr, sizeof(packet.destination));
	first = bpf_ntohl(packet.source[0]);
	length = bpf_ntohs(ip->payload_len);
	// A source that is unspecified, loopback, multicast (ff00::/8) or link-local (fe80::/10) is not
	// forwarded.
	if (*(__u8 *)ip >> 4 != 6 || ip->hop_limit <= 1 || !length || length + sizeof(*ip) + ETH_HLEN > skb->len ||
	    !first || first >> 24 == 0xff || first >> 22 == 0xfe80 >> 6)
		return TCX_NEXT;
	packet.protocol = ip->nexthdr;
	packet.headers = sizeof(*ip);
	packet.length = length + sizeof(*ip);
	limit = ip->hop_limit - 1;
	services = *(__u16 *)ip;
	if (!transport(skb, &packet) || returned(&packet, bpf_ntohs(services) >> 6))
		return TCX_NEXT;
	index = select(&packet, *record, 6);
	hop = forwardable(skb, &packet, index);
	if (!hop)
		return TCX_NEXT;
	services = (services & bpf_htons(0xf03f)) | bpf_htons(ASK << 6);
	// IPv6 has no header checksum that hides the change from CHECKSUM_COMPLETE.
	if (bpf_skb_store_bytes(skb, ETH_HLEN + __builtin_offsetof(struct ipv6hdr, hop_limit), &limit, 1,
				BPF_F_RECOMPUTE_CSUM))
		return TCX_DROP; // never: the header is linear
	if (index & ASKS && packet.later && bpf_skb_store_bytes(skb, ETH_HLEN, &services, 2, BPF_F_RECOMPUTE_CSUM))
		return TCX_DROP;
	return redirect(&packet, hop, index);
}

SEC("tcx/ingress")
int fastpath(struct __sk_buff *skb)
{
	// A frame for another host, or of a VLAN, which the interface of the VLAN receives again.
	if (skb->pkt_type != 0 || skb->vlan_present)
		return TCX_NEXT;
	if (skb->protocol == bpf_htons(ETH_P_IP))
		return ipv4(skb);
	if (skb->protocol == bpf_htons(ETH_P_IPV6))
		return ipv6(skb);
	return TCX_NEXT;
}

// None of the helpers above needs a license compatible with the GPL.
char licensed[] SEC("license") = "Apache-2.0";
