"""Decodes DNS questions and encodes answers.

RFC 1035 for the messages, RFC 6891 for EDNS, RFC 2308 for "no such name" and "no such record",
RFC 8482 for ANY. dnspython parses and packs the messages.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.opcode
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from resolver.zone import DnsAnswer, DnsRecord, ZoneSubject, subject

UDP_PAYLOAD = 1232
"""Largest answer over UDP, from DNS Flag Day 2020: it is not fragmented on any path."""
PLAIN_PAYLOAD = 512
"""Largest UDP answer to a client without EDNS (RFC 1035, 2.3.4)."""
TCP_PAYLOAD = 65_535
MAX_ANSWERS = 1000
"""Most records of an answer. For a larger job each answer has a different random thousand, because
all would not fit a TCP answer."""


@dataclass(frozen=True, slots=True)
class Zone:
    """The zone for which this server answers."""

    name: dns.name.Name
    ttl_s: int
    """How long an answer may be cached. At most a job's `update.drain_s`; otherwise clients call
    tasks that are stopping."""

    def text(self) -> str:
        """Return the zone's name without the last dot."""
        return str(self.name).rstrip(".")


@dataclass(frozen=True, slots=True)
class DnsQuestion:
    """A well-formed query for one name of the Internet class."""

    query: dns.message.Message
    name: dns.name.Name
    kind: str
    """`A`, `SRV`, …; `TYPE65280` for a type without a name."""

    def subject_in(self, zone: Zone) -> ZoneSubject | None:
        """Return the subject of the question; None if the name is not possible in the zone."""
        labels = self.name.relativize(zone.name).labels
        return subject([label.decode("ascii", "replace") for label in labels])


def decode_query(wire: bytes) -> DnsQuestion | dns.message.Message | None:
    """Return the question, or the refusal to send, or None if no answer must be sent."""
    try:
        query = dns.message.from_wire(wire)
    except dns.exception.DNSException:
        return _malformed(wire)
    if query.flags & dns.flags.QR:
        return None  # an answer; replying to it could start a loop
    if query.opcode() != dns.opcode.QUERY:
        return _refusal(query, dns.rcode.NOTIMP)
    if len(query.question) != 1:
        return _refusal(query, dns.rcode.FORMERR)
    asked = query.question[0]
    if asked.rdclass != dns.rdataclass.IN:
        return _refusal(query, dns.rcode.REFUSED)
    return DnsQuestion(query, asked.name, dns.rdatatype.to_text(asked.rdtype))


def _malformed(wire: bytes) -> dns.message.Message | None:
    """Return FORMERR for a query with a valid header, else None."""
    if len(wire) < 12 or wire[2] & 0x80:
        return None
    reply = dns.message.Message(id=int.from_bytes(wire[:2], "big"))
    reply.flags = dns.flags.Flag.QR
    reply.set_rcode(dns.rcode.FORMERR)
    return reply


def _refusal(query: dns.message.Message, code: dns.rcode.Rcode) -> dns.message.Message:
    reply = dns.message.make_response(query)
    reply.set_rcode(code)
    return reply


def refused_reply(question: DnsQuestion) -> dns.message.Message:
    """Return the reply for a name outside the zone: this server does not recurse."""
    return _refusal(question.query, dns.rcode.REFUSED)


def servfail_reply(question: DnsQuestion) -> dns.message.Message:
    """Return the reply while the addresses of a job are unknown."""
    return _refusal(question.query, dns.rcode.SERVFAIL)


def apex_reply(question: DnsQuestion, zone: Zone) -> dns.message.Message:
    """Return the reply for the zone itself."""
    reply = _authoritative(question)
    if question.kind in ("SOA", "ANY"):
        reply.answer.append(_soa(zone))
    elif question.kind == "NS":
        data = f"ns.{zone.name}"
        reply.answer.append(dns.rrset.from_text(zone.name, zone.ttl_s, "IN", "NS", data))
    else:
        reply.authority.append(_soa(zone))
    return reply


def answer_reply(
    question: DnsQuestion, zone: Zone, answer: DnsAnswer, randomness: random.Random
) -> dns.message.Message:
    """Return the reply with these records in random order, because clients take the first."""
    reply = _authoritative(question)
    if not answer.exists:
        reply.set_rcode(dns.rcode.NXDOMAIN)
    if not answer.answers:
        reply.authority.append(_soa(zone))
        return reply
    mixed = list(answer.answers)
    randomness.shuffle(mixed)
    reply.answer.extend(_rrsets(mixed[:MAX_ANSWERS], zone))
    if len(mixed) <= MAX_ANSWERS:
        reply.additional.extend(_rrsets(answer.additional, zone))
    return reply


def encode_reply(reply: dns.message.Message, query: bytes, *, tcp: bool) -> bytes:
    """Return the reply as bytes.

    A reply that does not fit loses its additional records. If it still does not fit it is marked
    as truncated, and the client repeats the query over TCP.
    """
    limit = TCP_PAYLOAD if tcp else _udp_limit(query)
    try:
        return reply.to_wire(max_size=limit)
    except dns.exception.TooBig:
        reply.additional = []
    try:
        return reply.to_wire(max_size=limit)
    except dns.exception.TooBig:
        reply.answer, reply.authority = [], []
        reply.flags |= dns.flags.TC
        return reply.to_wire(max_size=limit)


def _udp_limit(query: bytes) -> int:
    """Return the limit of an answer over UDP in bytes: the client's, within our own."""
    try:
        parsed = dns.message.from_wire(query)
    except dns.exception.DNSException:
        return PLAIN_PAYLOAD
    if parsed.edns < 0:
        return PLAIN_PAYLOAD
    return min(UDP_PAYLOAD, max(PLAIN_PAYLOAD, parsed.payload))


def _authoritative(question: DnsQuestion) -> dns.message.Message:
    reply = dns.message.make_response(question.query, our_payload=UDP_PAYLOAD)
    reply.flags |= dns.flags.AA
    return reply


def _soa(zone: Zone) -> dns.rrset.RRset:
    name = zone.name
    data = f"ns.{name} hostmaster.{name} 1 3600 600 86400 {zone.ttl_s}"
    return dns.rrset.from_text(name, zone.ttl_s, "IN", "SOA", data)


def _rrsets(records: Iterable[DnsRecord], zone: Zone) -> Sequence[dns.rrset.RRset]:
    """Return records of the same name and type as one set, in their order."""
    sets: dict[tuple[str, str], list[str]] = {}
    for record in records:
        sets.setdefault((record.name, record.type), []).append(record.data)
    rrsets = []
    for (name, kind), data in sets.items():
        owner = dns.name.from_text(name, zone.name)
        rrset = dns.rrset.from_text_list(
            owner, zone.ttl_s, "IN", kind, data, origin=zone.name, relativize=False
        )
        rrsets.append(rrset)
    return rrsets
