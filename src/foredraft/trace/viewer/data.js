"use strict";
/* What is counted and said of tokens and rounds. Whoever has rounds puts their steps here, by number. */

const Data = (() => {
  const steps = {};

  const CONTROL = /[\u0000-\u0008\u000b-\u001f]/g;

  /** A token's text as it can be shown: control characters as their pictures. */
  const visible = (text) =>
    text.replace(CONTROL, (c) => String.fromCharCode(0x2400 + c.charCodeAt(0))).replace(/[\u007f-\u009f]/g, "\ufffd");

  /** A token's name: white space is spelt out, and a token without text is known by its id. */
  const nameOf = (token) =>
    token.text === "" ? `#${token.id}` : visible(token.text).replace(/ /g, "·").replace(/\n/g, "↵").replace(/\t/g, "⇥");

  const quoted = (token) => `“${nameOf(token)}”`;

  const acceptedOf = (round) => round.draft.filter((token) => token.verdict === "accepted");
  const rejectedOf = (round) => round.draft.find((token) => token.verdict === "rejected");
  const keptOf = (round) => (round.own ? [...acceptedOf(round), round.own] : acceptedOf(round));

  const grow = (list, length) => {
    for (let i = 0; i < length; i++) list[i] = (list[i] ?? 0) + 1;
  };

  /** The counts of SpeculationStats, from the rounds alone. */
  function countsOf(rounds) {
    const counts = {
      num_steps: 0, num_spec_steps: 0, num_draft_tokens: 0, num_accepted_tokens: 0, num_evaluated_tokens: 0,
      num_emitted_tokens: 0, acceptance_histogram: [], drafted_per_position: [], evaluated_per_position: [],
      accepted_per_position: [],
    };
    for (const round of rounds) {
      counts.num_steps += 1;
      counts.num_emitted_tokens += keptOf(round).length;
      if (round.draft.length === 0) continue;
      const accepted = acceptedOf(round).length;
      const evaluated = accepted + (rejectedOf(round) ? 1 : 0);
      counts.num_spec_steps += 1;
      counts.num_draft_tokens += round.draft.length;
      counts.num_accepted_tokens += accepted;
      counts.num_evaluated_tokens += evaluated;
      const histogram = counts.acceptance_histogram;
      for (let j = 0; j <= round.draft.length; j++) histogram[j] = (histogram[j] ?? 0) + (j === accepted ? 1 : 0);
      grow(counts.drafted_per_position, round.draft.length);
      grow(counts.evaluated_per_position, evaluated);
      grow(counts.accepted_per_position, accepted);
    }
    return counts;
  }

  const percent = (part, whole) => (whole ? `${Math.round((100 * part) / whole)} %` : "–");
  const ratio = (part, whole, digits = 2) => (whole ? (part / whole).toFixed(digits) : "–");

  function probability(value) {
    if (value === null || value === undefined) return "–";
    if (value !== 0 && value < 0.001) return "< .001";
    if (value === 0 || value === 1) return String(value);
    return value > 0.999 ? "> .999" : value.toFixed(3).replace(/^0/, "");
  }

  function seconds(value) {
    if (value >= 1) return `${value.toFixed(2)} s`;
    return value >= 0.001 ? `${(1000 * value).toFixed(1)} ms` : `${(1e6 * value).toFixed(0)} µs`;
  }

  /** A round in a sentence. */
  function said(round) {
    const accepted = acceptedOf(round).length;
    const rejected = rejectedOf(round);
    if (round.draft.length === 0 && round.own) return `No draft. The target wrote ${quoted(round.own)}.`;
    const parts = [`${round.draft.length} drafted, ${accepted} accepted.`];
    if (rejected) parts.push(`${quoted(rejected)} fell, and the target wrote ${quoted(round.own)}.`);
    else if (round.own) parts.push(`The whole draft was accepted, and the target added ${quoted(round.own)}.`);
    else parts.push("The text ended there.");
    return parts.join(" ");
  }

  return {
    steps, visible, nameOf, acceptedOf, rejectedOf, keptOf, countsOf, percent, ratio, probability,
    seconds, said,
  };
})();
