"use strict";
/* Puts the parts together: one text and one round are chosen, and every part shows them. */

(() => {
  const $ = (id) => document.getElementById(id);
  const { texts, steps, counts: allCounts } = JSON.parse($("trace").textContent);
  Object.assign(Data.steps, steps);
  let text = texts[0];

  const textView = new TextView((index) => player.choose(index));
  const timeline = new Timeline((index) => player.choose(index));
  const table = new RoundsTable();
  const player = new Player((index) => {
    textView.select(index);
    timeline.select(index);
  });

  function open(chosen) {
    text = chosen;
    $("text-error").hidden = !text.error;
    $("text-error").textContent = text.error ? `This text failed: ${text.error}` : "";
    tellCounts();
    textView.show(text);
    timeline.show(text);
    table.show(text);
    player.show(text);
    player.choose(text.rounds.findIndex((round) => Data.rejectedOf(round) && Data.acceptedOf(round).length));
  }

  function tellCounts() {
    const counts = Data.countsOf(text.rounds);
    const time = text.rounds.reduce((sum, { step }) => sum + Timeline.end(Data.steps[step]) - Data.steps[step].start, 0);
    const accepted = counts.num_accepted_tokens;
    const figures = [
      ["tokens", counts.num_emitted_tokens.toLocaleString("en")],
      ["rounds", counts.num_steps.toLocaleString("en")],
      ["tokens per round", Data.ratio(counts.num_emitted_tokens, counts.num_steps)],
      ["draft tokens accepted", Data.percent(accepted, counts.num_draft_tokens), `${accepted.toLocaleString("en")} of ${counts.num_draft_tokens.toLocaleString("en")}`],
      ["α, accepted / evaluated", Data.ratio(accepted, counts.num_evaluated_tokens)],
      ["τ, mean acceptance length", counts.num_spec_steps ? (1 + accepted / counts.num_spec_steps).toFixed(2) : "–"],
      ["in these rounds", Data.seconds(time)],
    ];
    $("figures").replaceChildren(...figures.map(RoundView.figure));
    $("counts").replaceChildren(
      ...Object.entries(counts).map(([name, value]) => {
        const row = RoundView.row([name, String(value), String(allCounts[name])]);
        row.dataset.count = name;
        return row;
      }),
    );
  }

  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") $("tip").hidden = true;
  });
  $("text-choice").append(
    ...texts.map((one, index) => {
      const start = (one.prompt ?? `${one.numPromptIds} prompt tokens`).replace(/\s+/g, " ").slice(-60);
      return new Option(`${index + 1}: ${start}${one.child ? ` (text ${one.child + 1})` : ""}`, index);
    }),
  );
  $("text-choice").addEventListener("change", () => open(texts[$("text-choice").value]));

  open(text);
  // two frames: the first is laid out and painted by the time the second is asked for
  requestAnimationFrame(() => requestAnimationFrame(() => {
    document.documentElement.dataset.ready = "true";
    performance.mark("ready");
  }));
})();
