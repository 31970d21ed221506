"use strict";

// ---- The head of the page, answers and figures.

function showAnswers() {
  document.title = `qada report: ${data.question.text}`;
  find("question").textContent = data.question.text;
  const { name, tokens, left_out: leftOut } = data.document;
  const cut = leftOut ? ` Its last ${count(leftOut, "token")} are left out.` : "";
  find("asked").textContent = `Asked about ${name}, ${count(tokens, "token")}.${cut} ${data.model}.`;
  const lengths = data.answers.map((answer) => answer.pieces.length);
  const longest = Math.max(...lengths);
  const ended = longest < data.most ? "" : ` ${count(data.most, "token")} are the most that were asked for.`;
  find("verdict").textContent = (data.same === longest ? `The same ${count(longest, "token")}.` :
    `The first ${count(data.same, "token")} of ${longest} are the same.`) + ended;
  data.answers.forEach((answer, which) => {
    const card = make("div", "", { class: "answer" });
    const text = make("p", "", { dir: "auto" });
    answer.pieces.forEach((piece, index) => {
      if (which === 0 || index >= recorded) return text.append(piece);
      const part = make("span", piece, { class: "piece", title: `token ${index + 1}: show what was read for it` });
      part.addEventListener("click", () => choose({ token: index, all: false }));  // keys have the slider
      text.append(part);
    });
    if (!answer.pieces.join("").trim()) text.append(make("span", "(nothing)", { class: "end" }));
    card.append(make("h3", answer.cache), text);
    find("answers").append(card);
  });
}

function showFigures() {
  for (const row of data.rows) {
    const line = make("tr"), heading = make("th", row.what, { scope: "row" });
    heading.append(make("span", row.how, { class: "how" }));
    line.append(heading);
    const most = Math.max(...row.cells.map((cell) => cell.value ?? 0)) || 1;
    row.cells.forEach((cell, which) => {
      const box = make("td", cell.text, { class: which === 0 ? "stock" : "ours" });
      if (cell.value !== null) {
        const bar = make("span", "", { class: "bar", "aria-hidden": "true" });
        bar.style.width = `${(100 * cell.value) / most}%`;
        box.append(bar);
      }
      line.append(box);
    });
    find("figures").append(line);
  }
  const notes = [
    `${data.machine}; ${count(data.threads, "thread")}; qada-cache ${data.version}; ${data.date}.`,
    data.cache,
    "Each cache read the document and answered once, after a short run that was not timed. Answers are greedy" +
      `${data.question.chat ? "" : ", and end with a line, as the tokenizer has no chat template"}.`,
    "Reads are of a second, untimed pass of QAdACache over its own answer: torch computes what is observed, where a " +
      "kernel may have computed what was timed. Roundings differ, so a few selected tokens may, too.",
    `The question's ${count(data.question.tokens, "token")} were read together, and gave the answer's first token.`,
    "Not measured: other questions and documents, batches, the most memory that was taken, and whether an answer is " +
      "true.",
  ];
  if (recorded < ours.pieces.length) {
    const all = count(ours.pieces.length, "token");
    notes.push(`Reads of the first ${recorded} of ${all} are here: a page has room for ${data.room} of them.`);
  }
  find("how").append(...notes.map((note) => make("li", note)));
}

// ---- The document's text.

const spans = [];

function showText() {
  words.forEach((word) => spans.push(make("span", word)));
  find("text").append(...spans);
  find("text").addEventListener("pointerover", (event) => {
    const index = spans.indexOf(event.target);
    if (index >= 0) describeWord(index);
  });
}

function describeWord(index) {
  const readers = new Set();
  for (const pass of shownPasses()) {
    unpack(pass).forEach((positions, head) => {
      if (positions === null || !isShown(NAMES[head])) return;
      const isRead = positions === true ? index + first >= data.sinks && index + first < pass.stored :
        positions.some((position) => owners[position - first] === index);
      if (isRead) readers.add(NAMES[head].join("."));
    });
  }
  const names = [...readers];
  const more = names.length > 24 ? ` and ${names.length - 24} more` : "";
  const who = names.length ? `${count(names.length, "head")} (layer.head): ${names.slice(0, 24).join(", ")}${more}.` :
    "read by no head shown.";
  find("hovered").textContent = `“${words[index].trim()}”, token ${index + 1} of ${words.length}: ${who}`;
}

function scrollTo(index) {
  for (const span of document.querySelectorAll("#text .found")) span.classList.remove("found");
  spans[index].classList.add("found");
  const box = find("text");
  box.scrollTop = spans[index].offsetTop - box.clientHeight / 3;
  describeWord(index);
}

// ---- What changes with the view.

function choose(changes) {
  Object.assign(view, changes);
  const { token } = view;
  find("token").value = token + 1;
  find("token").disabled = view.all;
  find("all").checked = view.all;
  find("head").value = [view.layer ?? "", view.head ?? ""].join(".");
  const piece = ours.pieces[token].replace(/\s/g, " ");
  find("which").textContent = view.all ? `all ${recorded}` : `${token + 1} of ${recorded}: “${piece}”`;
  find("token").setAttribute("aria-valuetext", `token ${token + 1} of ${recorded}: ${piece}`);
  document.querySelectorAll(".piece").forEach((part, index) =>
    part.classList.toggle("now", !view.all && index === token));
  const reads = countReads(shownPasses());
  showTold(reads);
  const levels = colourText(reads);
  showPassages(reads, levels);
  drawMap();
}

function showTold({ selected, whole, reads }) {
  const passes = shownPasses(), most = words.length.toLocaleString("en");
  if (!passes.length) {
    find("told").textContent = "Read exactly: every head read every word, as in a prompt.";
    return;
  }
  const sum = (of) => passes.reduce((total, pass) => total + of(pass), 0), shown = NAMES.filter(isShown).length;
  const needing = sum((pass) => pass.needing).toLocaleString("en");
  const all = (NAMES.length * passes.length).toLocaleString("en");
  const heads = shown < NAMES.length ? count(shown, "head") :
    `${needing} of ${all} ${view.all ? "decisions of heads" : "heads"} needed the long context. They`;
  const different = selected.reduce((total, times) => total + (times > 0), 0).toLocaleString("en");
  const each = Math.round(reads / Math.max(1, shown * passes.length - whole)).toLocaleString("en");
  const wholly = whole ? ` ${count(whole, "time")} all of it was read.` : "";
  find("told").textContent = `${heads} selected ${different} different tokens of the document's ${most}, ` +
    `${each} a head${view.all ? " and token of the answer" : ""} on average.${wholly}`;
}

/** Colours the words, and returns their levels from 0 to 5. */
function colourText({ selected, whole }) {
  const most = selected.reduce((most, times) => Math.max(most, times), 0);
  const pass = view.all ? null : data.passes[view.token];
  const exact = !view.all && pass === null;
  const levels = words.map((_, index) => {
    const position = index + first;
    if (exact || (view.head !== null && whole && pass && position >= data.sinks && position < pass.stored)) return 3;
    return most ? Math.ceil(5 * Math.sqrt(selected[index] / most)) : 0;
  });
  spans.forEach((span, index) => {
    const position = index + first, near = position < data.sinks || (pass !== null && position >= pass.stored);
    const name = levels[index] ? `r${levels[index]}` : near ? "near" : "";
    if (span.className !== name) span.className = name;
  });
  return levels;
}

const usual = new Map();  // by what heads are shown: how often all passes selected each word

/** Words read for this token more often than for the others on average; of all tokens together, the most read. */
function showPassages({ selected }, levels) {
  const passes = data.passes.filter((pass) => pass !== null), alone = view.all || passes.length < 2;
  find("passages-title").textContent = alone ? "Most read" : "Read for this token more than for others";
  const key = find("head").value;
  if (!alone && !usual.has(key)) usual.set(key, countReads(passes).selected);
  const others = (index) => (alone ? 0 : usual.get(key)[index] / passes.length);
  const score = Float32Array.from(selected, (times, index) => times - others(index));
  const order = [...score.keys()].filter((index) => score[index] > 0).sort((a, b) => score[b] - score[a] || a - b);
  const chosen = [];
  for (const index of order) {
    if (chosen.length === 5) break;
    if (chosen.every((other) => Math.abs(other - index) > 12)) chosen.push(index);
  }
  const lines = chosen.map((index) => {
    const line = make("li"), button = make("button", "", { type: "button" });
    button.append(make("small", `token ${index + 1}, ${count(selected[index], view.all ? "read" : "head")}: `));
    for (let near = Math.max(0, index - 10); near < Math.min(words.length, index + 11); near++) {
      button.append(make("span", words[near].replace(/\s+/g, " "), levels[near] ? { class: `r${levels[near]}` } : {}));
    }
    button.addEventListener("click", () => scrollTo(index));
    line.append(button);
    return line;
  });
  find("passages").replaceChildren(...(lines.length ? lines : [make("li", "None.")]));
}

// ---- The map.

const MARGIN = 34;

function drawMap() {
  const canvas = find("map"), scale = window.devicePixelRatio || 1, width = canvas.clientWidth || 600;
  const row = Math.max(2, Math.min(20, Math.floor(420 / NAMES.length))), height = row * NAMES.length;
  canvas.style.height = `${height + 18}px`;
  canvas.width = width * scale;
  canvas.height = (height + 18) * scale;
  const style = getComputedStyle(document.documentElement), colour = (name) => style.getPropertyValue(name);
  const paint = canvas.getContext("2d");
  paint.scale(scale, scale);
  const across = width - MARGIN, columns = Math.max(1, Math.min(words.length, Math.floor(across)));
  paint.fillStyle = `rgb(${colour("--empty")})`;
  paint.fillRect(MARGIN, 0, across, height);
  const passes = shownPasses(), each = words.length / columns, step = across / columns;
  const stored = Math.min(words.length, Math.max(0, ...passes.map((pass) => pass.stored - first)));
  paint.fillStyle = colour("--near");
  if (passes.length) paint.fillRect(MARGIN + (across * stored) / words.length, 0, across, height);
  NAMES.forEach((name, index) => {
    const bins = new Float32Array(columns);
    let whole = 0;
    for (const pass of passes) {
      const positions = unpack(pass)[index];
      if (positions === true) whole++;
      else for (const position of positions ?? []) {
        const place = position - first;
        if (place >= 0 && place < words.length) bins[Math.floor(place / each)]++;
      }
    }
    const faint = isShown(name) ? 1 : 0.25;
    if (whole) {
      paint.fillStyle = `rgba(${colour("--whole")}, ${faint * (0.25 + (0.75 * whole) / passes.length)})`;
      paint.fillRect(MARGIN, index * row, (across * stored) / words.length, row);
    }
    bins.forEach((times, bin) => {
      if (!times) return;
      const share = Math.min(1, times / each / passes.length);
      paint.fillStyle = `rgba(${colour("--read")}, ${faint * Math.max(0.2, Math.sqrt(share))})`;
      paint.fillRect(MARGIN + bin * step, index * row, Math.max(1, step), row);
    });
  });
  paint.fillStyle = colour("--quiet");
  paint.font = "11px system-ui, sans-serif";
  const every = Math.ceil(14 / (row * data.heads));
  data.layers.forEach((layer, index) => {
    if (index % every === 0) paint.fillText(`L${layer}`, 2, index * row * data.heads + 10);
  });
  paint.fillText("token 1", MARGIN, height + 14);
  paint.textAlign = "right";
  paint.fillText(words.length.toLocaleString("en"), width - 1, height + 14);
  const size = `Map of ${NAMES.length} KV heads by ${words.length} tokens.`;
  canvas.setAttribute("aria-label", `${size} ${find("told").textContent}`);
}

find("map").addEventListener("click", (event) => {
  const box = find("map").getBoundingClientRect(), row = (box.height - 18) / NAMES.length;
  const [layer, head] = NAMES[Math.max(0, Math.min(NAMES.length - 1, Math.floor((event.clientY - box.top) / row)))];
  const place = Math.floor((words.length * (event.clientX - box.left - MARGIN)) / (box.width - MARGIN));
  choose({ layer, head });
  scrollTo(Math.max(0, Math.min(words.length - 1, place)));
});

// ---- Controls.

find("token").max = recorded;
find("token").addEventListener("input", () => choose({ token: find("token").value - 1 }));
find("all").addEventListener("change", () => choose({ all: find("all").checked }));
find("before").addEventListener("click", () => choose({ token: Math.max(0, view.token - 1), all: false }));
find("after").addEventListener("click", () => choose({ token: Math.min(recorded - 1, view.token + 1), all: false }));
find("head").append(make("option", "every layer and head", { value: "." }));
for (const layer of data.layers) {
  const group = make("optgroup", "", { label: `layer ${layer}` });
  group.append(make("option", `layer ${layer}, every head`, { value: `${layer}.` }));
  for (let head = 0; head < data.heads; head++) {
    group.append(make("option", `layer ${layer}, KV head ${head}`, { value: `${layer}.${head}` }));
  }
  find("head").append(group);
}
find("head").addEventListener("change", () => {
  const [layer, head] = find("head").value.split(".").map((part) => (part === "" ? null : Number(part)));
  choose({ layer, head });
});
window.addEventListener("resize", drawMap);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawMap);

showAnswers();
showFigures();
showText();
choose({});
