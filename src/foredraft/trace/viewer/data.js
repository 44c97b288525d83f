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
  const allRejectedOf = (round) => round.draft.filter((token) => token.verdict === "rejected");
  const rejectedOf = (round) => allRejectedOf(round)[0];
  const keptOf = (round) => (round.own ? [...acceptedOf(round), round.own] : acceptedOf(round));

  /** The place in the draft of the token before one, -1 for none. */
  const parentOf = (round, place) => round.draft[place].parent ?? place - 1;
  const isTree = (round) => round.draft.some((token, place) => parentOf(round, place) !== place - 1);

  /** How far behind the text each draft token stands, from 0. */
  function depthsOf(round) {
    const depths = [];
    round.draft.forEach((_, place) => depths.push(parentOf(round, place) < 0 ? 0 : depths[parentOf(round, place)] + 1));
    return depths;
  }

  /** Tokens on the longest branch. */
  const longestOf = (round) => Math.max(0, ...depthsOf(round).map((depth) => depth + 1));

  /** Branches: tokens that no other follows. */
  const endsOf = (round) => {
    const followed = new Set(round.draft.map((_, place) => parentOf(round, place)));
    return round.draft.filter((_, place) => !followed.has(place)).length;
  };

  /** A lane for each draft token: 0 for the branch that the text took, or would have taken; siblings beside each other in others. */
  function lanesOf(round) {
    const depths = depthsOf(round), lanes = round.draft.map(() => null), used = new Set();
    const children = (place) => round.draft.map((_, other) => other).filter((other) => parentOf(round, other) === place);
    const take = (place, lane) => { lanes[place] = lane; used.add(`${depths[place]} ${lane}`); };
    let last = -1;
    while (children(last).length) {
      last = children(last).find((place) => round.draft[place].verdict === "accepted") ?? children(last)[0];
      take(last, 0);
    }
    round.draft.forEach((_, place) => {
      if (lanes[place] !== null) return;
      let lane = Math.max(1, lanes[parentOf(round, place)] ?? 1);
      while (used.has(`${depths[place]} ${lane}`)) lane += 1;
      take(place, lane);
    });
    return lanes;
  }

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
      const longest = longestOf(round);
      for (let j = 0; j <= longest; j++) histogram[j] = (histogram[j] ?? 0) + (j === accepted ? 1 : 0);
      grow(counts.drafted_per_position, longest);
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
    const rejected = allRejectedOf(round).map(quoted).join(", ");
    if (round.draft.length === 0 && round.own) return `No draft. The target wrote ${quoted(round.own)}.`;
    const branches = isTree(round) ? ` in a tree of ${endsOf(round)} branches` : "";
    const parts = [`${round.draft.length} drafted${branches}, ${accepted} accepted.`];
    if (rejected) parts.push(`The target rejected ${rejected} and wrote ${quoted(round.own)}.`);
    else if (round.own) parts.push(`The whole ${branches ? "branch" : "draft"} was accepted, and the target added ${quoted(round.own)}.`);
    else parts.push("The text ended there.");
    return parts.join(" ");
  }

  return {
    steps, visible, nameOf, acceptedOf, rejectedOf, allRejectedOf, keptOf, countsOf, percent, ratio, probability,
    seconds, said, parentOf, isTree, depthsOf, longestOf, lanesOf,
  };
})();
