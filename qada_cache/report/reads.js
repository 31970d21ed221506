"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const { words, first } = data.document;
const ours = data.answers[1];
const find = (id) => document.getElementById(id);
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

/** An element with text, which is never taken for markup. */
function make(name, text = "", attributes = {}) {
  const element = document.createElement(name);
  element.textContent = text;
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  return element;
}

/** Of each token the one whose piece of text it is in: tokens without a character of their own belong to one before. */
const owners = words.map((_, index) => index);
for (let index = 1; index < words.length; index++) if (words[index] === "") owners[index] = owners[index - 1];

// ---- Reads: each pass has a record for every layer and KV head: 0 nothing, 1 everything, else tokens by their steps.

const NAMES = data.layers.flatMap((layer) => Array.from({ length: data.heads }, (_, head) => [layer, head]));
const unpacked = new Map();

/** Of one pass, by head: null for nothing, true for the whole long context, else positions of the cache's tokens. */
function unpack(pass) {
  if (unpacked.has(pass)) return unpacked.get(pass);
  const bytes = Uint8Array.from(atob(pass.packed), (letter) => letter.charCodeAt(0));
  let at = 0;
  const number = () => {
    let value = 0;
    for (let shift = 0; ; shift += 7) {
      const byte = bytes[at++];
      value += (byte & 127) * 2 ** shift;
      if (byte < 128) return value;
    }
  };
  const heads = NAMES.map(() => {
    const kind = number();
    if (kind < 2) return kind === 1 ? true : null;
    const positions = new Uint32Array(kind - 2);
    let position = 0;
    for (let index = 0; index < positions.length; index++) positions[index] = position += number();
    return positions;
  });
  unpacked.set(pass, heads);
  return heads;
}

// ---- What is shown: one token of the answer or all of them, one head or all of them.

const recorded = data.passes.length;
const view = { token: Math.min(1, recorded - 1), all: false, layer: null, head: null };
const isShown = ([layer, head]) =>
  (view.layer === null || layer === view.layer) && (view.head === null || head === view.head);
const shownPasses = () => (view.all ? data.passes : [data.passes[view.token]]).filter((pass) => pass !== null);

/** How often each word was selected by the heads shown in these passes, and how often they read all. */
function countReads(passes) {
  const selected = new Uint32Array(words.length);
  let whole = 0, reads = 0;
  for (const pass of passes) {
    unpack(pass).forEach((positions, index) => {
      if (positions === null || !isShown(NAMES[index])) return;
      if (positions === true) return whole++;
      let last;  // a head that selects several tokens of a character reads it once
      for (const position of positions) {
        const owner = owners[position - first];  // undefined outside of the document
        if (owner === undefined) continue;
        if (owner !== last) selected[owner]++;
        last = owner;
        reads++;
      }
    });
  }
  return { selected, whole, reads };
}
