"use strict";

// Refreshed after each answer, so that a slow look is never overtaken by the next.
const EVERY_MS = 3000;
const OPEN = new Set(); // reasons whose examples the reader has opened

function showRun({ run, build, taken }) {
  $("build").textContent = build;
  document.title = build;
  const pill = $("run");
  if (run.at_work) {
    pill.textContent = run.started === null ? "at work" : `at work for ${duration(taken - run.started)}`;
    pill.className = "pill good";
  } else {
    pill.textContent = run.last_sign === null ? "no run at work" : `no run at work, last answers ${clock(run.last_sign)}`;
    pill.className = "pill";
  }
  $("seen").textContent = "as of " + new Date(taken * 1000).toLocaleTimeString();
}

function showProgress({ shards, prompts }) {
  const stages = [
    ["published", "finished"],
    ["answered", "answered, not published yet"],
    ["generating", "generating"],
    ["begun", "begun and stopped"],
    ["waiting", "waiting"],
  ].filter(([name]) => shards[name] > 0);
  $("bar").setAttribute("aria-label", stages.map(([name, what]) => `${shards[name]} shards ${what}`).join(", "));
  $("bar").replaceChildren(
    ...stages.map(([name]) => {
      const part = make("span", { class: name });
      part.style.flex = `${shards[name]} 1 0`;
      return part;
    }),
  );
  const restored = shards.to_restore ? `${number(shards.restored)} of ${number(shards.to_restore)} restored from S3` : null;
  $("legend").replaceChildren(
    make("li", {}, `${plural(shards.all, "shard")}:`),
    ...stages.map(([name, what]) => make("li", {}, make("i", { class: name }), `${number(shards[name])} ${what}`)),
    ...(restored ? [make("li", { class: "quiet" }, restored)] : []),
    ...(prompts.in_flight ? [make("li", { class: "quiet" }, `${plural(prompts.in_flight, "request")} in flight`)] : []),
  );
}

function showCards({ prompts, pace, outlook, fleet, store, dataset, run }) {
  const card = (name, value, small) => make("div", { class: "card" }, make("small", {}, name), make("b", {}, value), make("small", {}, small));
  const now = pace.tokens_per_s_now;
  const mtp = { on: "MTP is on", useless: "MTP is on and useless", off: "MTP is off" }[fleet.mtp] || "the servers don't say";
  const left = prompts.left === 0 ? "done" : duration(outlook.left_s);
  const end = outlook.finished_at === null || prompts.left === 0 ? (run.at_work ? "of answering" : "no run at work") : `until ${clock(outlook.finished_at)}`;
  const cards = [
    card("answered", share(dataset.answered_share, 1), `${number(prompts.ok)} of ${number(prompts.all)} prompts`),
    card("left", left, prompts.left === 0 ? "every prompt has its row" : end),
    card("tokens a second", number(now ?? pace.tokens_per_s), now === null ? "mean while answering" : `now; mean ${number(pace.tokens_per_s)}`),
    card("requests a second", number(pace.requests_per_s_now ?? pace.requests_per_s, 2), `mean answer ${number(prompts.mean_tokens)} tokens`),
    card("accept length", number(fleet.accept_length, 2), mtp),
    card("failed", number(prompts.failed), prompts.not_reached ? `${plural(prompts.not_reached, "turn")} not reached after them` : "prompts of their own fault"),
  ];
  if (outlook.usd_per_gpu_hour !== null) {
    cards.push(card("cost so far", dollars(outlook.usd_so_far), `${dollars(outlook.usd_to_come)} to come`));
  }
  if (store.where !== null && !store.offline) {
    const since = store.behind_s === null ? "" : ` for ${duration(store.behind_s)}`;
    const behind = store.behind_shards ? `${plural(store.behind_shards, "shard")}, ${bytes(store.behind_bytes)} waiting${since}` : "nothing waiting";
    cards.push(card("shards in S3", number(store.published_shards), behind));
  }
  $("cards").replaceChildren(...cards);
}

function showWarnings({ warnings }) {
  $("warnings").hidden = warnings.length === 0;
  $("warnings").querySelector("ul").replaceChildren(...warnings.map((warning) => make("li", {}, warning)));
}

function showServers({ fleet, other_gpus: others }) {
  const servers = fleet.servers;
  $("servers").hidden = servers.length === 0 && others.length === 0;
  const waiting = fleet.alive ? `${fleet.ready} of ${servers.length} ready, ${plural(fleet.waiting, "request")} waiting for a place` : "no fleet at work; what they have answered";
  const gpus = others.map((gpu) => `GPU ${gpu.index}: ${share(gpu.use)} busy, ${number(gpu.power_w)} W, ${gib(gpu.bytes)}`);
  $("servers").querySelector(".note").textContent = [waiting, ...gpus].join("; ");
  const cap = (server) => {
    const effective = server.effective_cap ?? server.requested_cap;
    const capped = server.requested_cap !== null && server.requested_cap !== effective;
    return capped ? [`${number(effective)} of ${number(server.requested_cap)}`, "warn"] : number(effective);
  };
  const columns = [
    ["running", (server) => number(server.running)],
    ["queued", (server) => number(server.queued)],
    ["at once", cap],
    ["KV", (server) => share(server.kv_use)],
    ["Mamba", (server) => share(server.mamba_use)],
    ["tokens/s", (server) => number(server.tokens_per_s_now)],
    ["mean", (server) => number(server.tokens_per_s)],
    ["accept", (server) => number(server.accept_length_now, 2)],
    ["mean", (server) => number(server.accept_length, 2)],
    ["memory", (server) => gib(server.resident_bytes)],
    ["GPU", (server) => share(server.gpu_use)],
    ["power", (server) => (server.gpu_power_w === null ? "–" : number(server.gpu_power_w) + " W")],
    ["GPU memory", (server) => gib(server.gpu_bytes)],
    ["restarts", (server) => (server.restarts ? [number(server.restarts), "warn"] : "–")],
    ["answers", (server) => number(server.answers)],
  ].filter(([, value]) => servers.some((server) => value(server) !== "–"));
  const kind = { ready: "good", failed: "bad", refused: "bad" };
  table(
    $("servers").querySelector("table"),
    ["server", ["state", "text"], ...columns.map(([name]) => name)],
    servers.map((server) => [
      server.name,
      [server.state === null ? "–" : server.state + (server.state !== "ready" && server.why ? `: ${server.why}` : ""), `text ${kind[server.state] || ""}`],
      ...columns.map(([, value]) => value(server)),
    ]),
  );
}

/** One chart of a figure, a line a server. The scale begins at half of the lowest value, so that a drift can be seen. */
function chart(trends) {
  const width = 300;
  const height = 90;
  const points = trends.flatMap((trend) => trend.points);
  const times = points.map((point) => point.at);
  const values = points.map((point) => point.value);
  const [first, last] = [Math.min(...times), Math.max(...times)];
  const [least, most] = [Math.min(...values) / 2, Math.max(...values)];
  const x = (at) => (last > first ? ((at - first) / (last - first)) * width : 0);
  const y = (value) => height - 2 - (most > least ? (value - least) / (most - least) : 0) * (height - 6);
  const space = "http://www.w3.org/2000/svg";
  const draw = (tag, attributes) => {
    const element = document.createElementNS(space, tag);
    for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
    return element;
  };
  const svg = draw("svg", { viewBox: `0 0 ${width} ${height}`, preserveAspectRatio: "none", "aria-hidden": "true" });
  svg.append(draw("line", { x1: 0, x2: width, y1: height - 1, y2: height - 1 }));
  trends.forEach((trend, index) => {
    const line = trend.points.map((point) => `${x(point.at).toFixed(1)},${y(point.value).toFixed(1)}`).join(" ");
    svg.append(draw("polyline", { points: line, class: `series-${index % 8}` }));
  });
  return [svg, make("p", { class: "times quiet" }, make("span", {}, clock(first)), make("span", {}, clock(last)))];
}

function showTrends({ trends }) {
  $("trends").hidden = trends.length === 0;
  const text = (trend, value) =>
    trend.what === "memory" ? gib(value) : number(value, trend.what === "accept length" ? 2 : 0);
  const kinds = [...new Set(trends.map((trend) => trend.what))];
  $("trends").querySelector(".curves").replaceChildren(
    ...kinds.map((kind) => {
      const ours = trends.filter((trend) => trend.what === kind);
      const lines = ours.map((trend, index) => {
        const percent = Math.round(trend.change * 100) + 0; // + 0: there is no -0
        const change = `${text(trend, trend.first)} → ${text(trend, trend.last)} (${percent > 0 ? "+" : ""}${percent} %)`;
        return make(
          "li",
          { class: trend.warning ? "warn" : "" },
          make("i", { class: `series-${index % 8}` }),
          make("span", {}, trend.server),
          make("span", {}, change),
        );
      });
      return make("figure", {}, make("figcaption", {}, kind), ...chart(ours), make("ul", { class: "series" }, ...lines));
    }),
  );
}

function showOutlook({ outlook }) {
  const line = (name, show) => [name, ...[outlook.estimated, outlook.actual].map((figures) => (figures ? show(figures) : "–"))];
  table($("outlook").querySelector("table"), ["", "expected by the pilot", "as it comes out"], [
    line("tokens an answer", (figures) => number(figures.mean_tokens)),
    line("tokens", (figures) => number(figures.tokens)),
    line("tokens/s a server", (figures) => number(figures.tokens_per_s_per_server)),
    line("server hours", (figures) => number(figures.server_hours, 2)),
    line("hours", (figures) => number(figures.hours, 2)),
    line("dollars", (figures) => dollars(figures.usd)),
  ]);
}

function showDataset({ dataset }) {
  const rows = [
    ["records", dataset.records],
    ["joined with others (rejoin)", dataset.joined],
    ["duplicates (dedupe)", dataset.duplicates],
    ["beyond the limit (limit)", dataset.beyond_limit],
    ...Object.entries(dataset.rejected_by_reason).map(([reason, count]) => [`rejected: ${reason}`, count]),
    ["conversations", dataset.conversations],
    [`prompts (turns: ${dataset.turns})`, dataset.prompts],
  ];
  table($("dataset").querySelector("table"), null, rows.map(([name, count]) => [name, number(count)]));
}

function showFailures({ failures }) {
  $("failures").hidden = failures.length === 0;
  $("failures").querySelector("div").replaceChildren(
    ...failures.map((failure) => {
      const examples = failure.examples.map((example) =>
        make(
          "li",
          {},
          `${example.shard}, conversation ${example.conversation_id.slice(0, 16)}, turn ${example.turn}, ${plural(example.attempts, "attempt")}`,
          example.prompt === null ? null : make("blockquote", {}, example.prompt),
        ),
      );
      const box = make("details", {}, make("summary", {}, `${number(failure.rows)} `, make("b", {}, failure.reason), `: ${failure.meaning}`), make("ul", {}, ...examples));
      box.open = OPEN.has(failure.reason);
      box.addEventListener("toggle", () => (box.open ? OPEN.add(failure.reason) : OPEN.delete(failure.reason)));
      return box;
    }),
  );
}

const VERDICTS = { passed: "passed", failed: "not passed", none: "no verdict: too few rows" };

function elsewhereNow(machine, taken) {
  const seen = `seen ${duration(Math.max(0, taken - machine.seen))} ago`;
  if (!machine.at_work) return `${machine.name}: its run is over, ${seen}`;
  return `${machine.name}: generating ${plural(machine.generating, "shard")}, ${number(machine.in_flight)} in flight, ${number(machine.tokens_per_s)} tokens/s, ${seen}`;
}

function showFacts({ root, model, run, prompts, store, verdict, faults, degenerate, cut_at_stop, fleet, elsewhere, taken }) {
  const passed = (value) => VERDICTS[value] ?? "not checked yet";
  const kinds = (counts) => Object.entries(counts).map(([kind, count]) => `${number(count)} ${kind.replaceAll("_", " ")}`).join(", ") || "none";
  const where = store.where === null ? "none: shards stay on this machine" : store.where + (store.offline ? " (offline)" : `, ${bytes(store.published_bytes)}`);
  const uploads =
    store.upload_s === null
      ? "–"
      : `${number(store.upload_s, 1)} s a shard at ${bytes(store.upload_bytes_per_s)}/s, ${duration(store.lag_s)} after their answers`;
  const facts = [
    ["folder", root],
    ["model", `${model} (${fleet.engine})`],
    ["run", run.pid === null ? "none at work" : `pid ${run.pid} on ${run.host}, since ${clock(run.started)}`],
    ["cut at the length limit", share(prompts.cut_share, 1)],
    ["reused from other builds", number(prompts.reused)],
    ["checks", `pilot ${passed(verdict.pilot)}, build ${passed(verdict.build)}` + (verdict.failed_checks.length ? `; not met: ${verdict.failed_checks.join(", ")}` : "")],
    ["server faults, tried again", kinds(faults)],
    ["answers of no use, asked again", kinds(degenerate)],
    ["answers cut at their stop token", number(cut_at_stop)],
    ["store", where],
    ["last uploads", uploads],
    ...elsewhere.map((machine) => ["also", elsewhereNow(machine, taken)]),
  ];
  $("facts").querySelector("dl").replaceChildren(...facts.flatMap(([name, value]) => [make("dt", {}, name), make("dd", {}, value)]));
}

const PARTS = [showRun, showProgress, showCards, showWarnings, showServers, showTrends, showOutlook, showDataset, showFailures, showFacts];

function trouble(sentence) {
  $("trouble").hidden = sentence === null;
  $("trouble").textContent = sentence ?? "";
}

async function refresh() {
  try {
    const answer = await fetch("status.json");
    const status = await answer.json();
    if (answer.ok) PARTS.forEach((show) => show(status));
    trouble(answer.ok ? null : status.error);
  } catch {
    trouble("The monitor does not answer any more: what stands here is old.");
  }
  setTimeout(refresh, EVERY_MS);
}

refresh();
