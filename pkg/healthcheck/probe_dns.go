package healthcheck

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/dns/dnsmessage"
)

// maxRecords is how many records of an answer are matched.
const maxRecords = 100

var recordTypes = map[string]dnsmessage.Type{
	"A": dnsmessage.TypeA, "AAAA": dnsmessage.TypeAAAA, "CNAME": dnsmessage.TypeCNAME, "MX": dnsmessage.TypeMX,
	"NS": dnsmessage.TypeNS, "PTR": dnsmessage.TypePTR, "SOA": dnsmessage.TypeSOA, "SRV": dnsmessage.TypeSRV,
	"TXT": dnsmessage.TypeTXT,
}

// rcodes are the names of response codes (RFC 1035 section 4.1.1, RFC 2136 section 2.2).
var rcodes = [...]string{
	"NOERROR", "FORMERR", "SERVFAIL", "NXDOMAIN", "NOTIMP", "REFUSED", "YXDOMAIN", "YXRRSET", "NXRRSET", "NOTAUTH",
	"NOTZONE",
}

func rcodeName(code dnsmessage.RCode) string {
	if int(code) < len(rcodes) {
		return rcodes[code]
	}
	return fmt.Sprintf("%d", code)
}

// question returns the question of a check, which the trench file bounds to a valid name.
func (plan *plan) question() dnsmessage.Question {
	name := strings.TrimSuffix(plan.DNS.Name, ".") + "."
	return dnsmessage.Question{
		Name: dnsmessage.MustNewName(name), Type: recordTypes[plan.DNS.Type], Class: dnsmessage.ClassINET,
	}
}

// queryDNS returns a query with a random identifier.
func (plan *plan) queryDNS() *query {
	id := uint16(rand.Uint32())
	message := dnsmessage.Message{
		Header:    dnsmessage.Header{ID: id, RecursionDesired: plan.DNS.Recursion},
		Questions: []dnsmessage.Question{plan.question()},
	}
	request, _ := message.Pack() // fails for names that the trench file rejects
	return &query{request: request, answer: func(packet []byte) (outcome, bool) { return plan.answerDNS(id, packet) }}
}

// answerDNS judges an answer to the query with an identifier.
func (plan *plan) answerDNS(id uint16, packet []byte) (o outcome, final bool) {
	var parser dnsmessage.Parser
	header, err := parser.Start(packet)
	switch {
	case err != nil:
		return plan.wrong("the answer is not DNS: %s", remark(err.Error())), true
	case header.ID != id || !header.Response:
		return plan.wrong("an answer to another query"), false
	}
	// Servers that fail early may leave out the question.
	asked := plan.question()
	questions, err := parser.AllQuestions()
	if err == nil && len(questions) > 0 && (len(questions) > 1 || questions[0].Type != asked.Type ||
		!strings.EqualFold(questions[0].Name.String(), asked.Name.String())) {
		return plan.wrong("an answer to another query"), false
	}
	wanted := slices.DeleteFunc(slices.Clone(plan.DNS.RCode[:]), func(code string) bool { return code == "" })
	if len(wanted) == 0 {
		wanted = rcodes[:1]
	}
	switch name := rcodeName(header.RCode); {
	case !slices.Contains(wanted, name):
		return plan.wrong("rcode %s, wanted %s", name, strings.Join(wanted, " or ")), true
	case err != nil:
		return plan.wrong("the answer is not DNS: %s", remark(err.Error())), true
	case plan.DNS.Answer == "":
		return outcome{verdict: succeeded}, true
	case header.Truncated:
		return plan.wrong("the answer is truncated: write transport: tcp"), true
	}
	return plan.matchRecords(&parser), true
}

// matchRecords finds a record of the answer section whose data matches.
func (plan *plan) matchRecords(parser *dnsmessage.Parser) outcome {
	first, count := "", 0
	expression, left := plan.body()
	for ; count < maxRecords && left > 0; count++ {
		record, err := parser.Answer()
		if errors.Is(err, dnsmessage.ErrSectionDone) {
			break
		}
		if err != nil {
			return plan.wrong("the answer is not DNS: %s", remark(err.Error()))
		}
		data := recordData(record.Body)
		data = data[:min(len(data), left)]
		left -= len(data)
		if expression.MatchString(data) {
			return outcome{verdict: succeeded}
		}
		if count == 0 {
			first = data
		}
	}
	if count == 0 {
		return plan.wrong("the answer has no record")
	}
	return plan.wrong("no record of the answer matches; the first of %d is %s", count, remark(first))
}

// recordData returns the data of a record as zone files show it.
func recordData(body dnsmessage.ResourceBody) string {
	switch record := body.(type) {
	case *dnsmessage.AResource:
		return netip.AddrFrom4(record.A).String()
	case *dnsmessage.AAAAResource:
		return netip.AddrFrom16(record.AAAA).String()
	case *dnsmessage.CNAMEResource:
		return record.CNAME.String()
	case *dnsmessage.NSResource:
		return record.NS.String()
	case *dnsmessage.PTRResource:
		return record.PTR.String()
	case *dnsmessage.MXResource:
		return fmt.Sprintf("%d %s", record.Pref, record.MX)
	case *dnsmessage.SRVResource:
		return fmt.Sprintf("%d %d %d %s", record.Priority, record.Weight, record.Port, record.Target)
	case *dnsmessage.SOAResource:
		return fmt.Sprintf("%s %s %d", record.NS, record.MBox, record.Serial)
	case *dnsmessage.TXTResource:
		return strings.Join(record.TXT, "")
	}
	return ""
}

// exchangeDNS sends the query over a TCP connection (RFC 7766).
func (plan *plan) exchangeDNS(ctx context.Context, conn net.Conn, _ netip.Addr) outcome {
	defer context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })()
	query := plan.queryDNS()
	framed := append(binary.BigEndian.AppendUint16(nil, uint16(len(query.request))), query.request...)
	if _, err := conn.Write(framed); err != nil {
		return plan.broken("no answer", "", err)
	}
	var length [2]byte
	if _, err := io.ReadFull(conn, length[:]); err != nil {
		return plan.broken("no answer", "", err)
	}
	packet := make([]byte, binary.BigEndian.Uint16(length[:]))
	if _, err := io.ReadFull(conn, packet); err != nil {
		return plan.broken("no end of the answer", "", err)
	}
	judged, _ := query.answer(packet)
	return judged
}
