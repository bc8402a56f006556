// The page: draws a picture, races plain against speculative decoding, shows what was drawn before.

import { Controls } from "/page/controls.js";
import { History, download } from "/page/history.js";
import { MAPS, Sheet, loadImage, paintBarcode } from "/page/sheet.js";
import { Refusal, fetchJson, postEvents } from "/page/stream.js";

const element = (id) => document.getElementById(id);
const PICTURE_TEXT = element("legend-text").textContent;
const sheets = [new Sheet(element("sheet-a")), new Sheet(element("sheet-b"))];
const history = new History(element("history"), openPicture);
let controls = null;
let running = null; // the AbortController of what is being drawn
let current = null; // the picture that is shown
let shown = 0; // the sheet whose numbers are shown

// ---- state of the page

function say(text, tone = "") {
  element("status").textContent = text;
  element("status").dataset.tone = tone;
}

/** Hides an element or not; the focus must not vanish with it. */
function setHidden(id, isHidden) {
  const hasFocus = element(id).contains(document.activeElement);
  element(id).hidden = isHidden;
  if (isHidden && hasFocus) element("draw").focus();
}

function setRunning(controller) {
  running = controller;
  setHidden("cancel", !controller);
  setHidden("race", Boolean(controller));
  element("draw").setAttribute("aria-disabled", Boolean(controller)); // a disabled button would lose the focus
  document.body.classList.toggle("drawing", Boolean(controller));
  for (const id of ["download", "replay"]) element(id).disabled = Boolean(controller) || !current;
}

function setView(view) {
  for (const button of document.querySelectorAll("[data-view]")) {
    const isChecked = button.dataset.view === view;
    button.setAttribute("aria-checked", isChecked);
    button.tabIndex = isChecked ? 0 : -1;
  }
  for (const sheet of sheets) sheet.show(view);
  updateLegend();
}

function updateLegend() {
  const { view } = sheets[0];
  element("legend").hidden = view === "picture";
  element("legend-text").textContent = MAPS[view] ?? PICTURE_TEXT;
  if (view === "picture") return;
  const [low, high] = sheets[shown].range(view);
  const digits = view === "entropy" ? 1 : 0;
  element("legend-low").textContent = low.toFixed(digits);
  element("legend-high").textContent = high.toFixed(digits);
}

function updateReadout() {
  const sheet = sheets[shown];
  const passes = sheet.passes.length;
  element("r-tokens").textContent = passes ? `${sheet.drawn} / ${sheet.cells}` : "–";
  element("r-passes").textContent = passes || "–";
  element("r-rate").textContent = passes ? ((sheet.drawn - 1) / passes).toFixed(1) : "–";
  element("r-seconds").textContent = passes ? sheet.seconds.toFixed(2) : "–";
  paintBarcode(element("barcode"), sheet);
  updateLegend();
}

function arrange(isRace, { rows, columns } = {}) {
  element("stage").classList.toggle("race", isRace);
  element("sheet-b").hidden = element("passes-lane").hidden = !isRace;
  element("sheet-a").setAttribute("aria-label", isRace ? "Plain decoding" : "Sheet");
  element("verdict").hidden = true;
  shown = isRace ? 1 : 0;
  for (const sheet of sheets) sheet.clear(rows ?? sheet.rows, columns ?? sheet.columns);
  updateReadout();
}

// ---- drawing

/** Draws one picture on a sheet; resolves to the picture. */
async function drawOn(sheet, body, signal) {
  let result = null;
  let isWaiting = false;
  const onEvent = async (name, data) => {
    if (name === "start") {
      announce(data);
      setHidden("key-row", true); // the key was accepted
      isWaiting = data.ahead > 0;
      if (data.rows !== sheet.rows || data.columns !== sheet.columns) sheet.clear(data.rows, data.columns);
    } else if (name === "waiting") {
      if (isWaiting) sayProgress(data.ahead);
    } else if (name === "pass") {
      sheet.addPass(data);
      if (isWaiting) sayProgress(0);
      isWaiting = false;
      if (sheet === sheets[shown]) updateReadout();
    } else if (name === "preview") {
      const preview = await loadImage("jpeg", data.image);
      if (!signal.aborted) sheet.showPreview(preview, data.cells);
    } else if (name === "done") {
      result = data;
    }
  };
  await postEvents("/draw", body, { key: sessionStorage.getItem("key"), signal, onEvent });
  const image = await loadImage("png", result.image);
  sheet.finish(image, result.maps, body.prompt);
  const { rows, columns, passes } = sheet;
  return { body, result, image, rows, columns, passes };
}

function announce({ ahead, unknown_words: unknown }) {
  if (unknown.length) {
    const words = unknown.slice(0, 6).map((word) => `“${word}”`).join(", ");
    say(`The model was not trained with ${words} and draws something else instead.`, "note");
  } else {
    sayProgress(ahead);
  }
}

function sayProgress(ahead) {
  if (element("status").dataset.tone === "note") return; // it stays until the next picture
  say(ahead ? `Waiting: ${ahead} ${ahead === 1 ? "picture is" : "pictures are"} ahead.` : "Drawing.");
}

/** Runs something that can be cancelled or refused, and then `onFailure`. */
async function attempt(action, onFailure = abandon) {
  if (running) return;
  const controller = new AbortController();
  setRunning(controller);
  say("Asking the server.");
  try {
    if (!controls) await connect();
    await action(controller.signal);
    if (element("status").dataset.tone !== "note") say("Finished.");
  } catch (error) {
    onFailure();
    if (error.name === "AbortError") say("Cancelled.");
    else if (error instanceof Refusal) refuse(error);
    else throw error;
  } finally {
    setRunning(null);
  }
}

/** A picture that was not begun leaves the one before it on the sheet; one that was not finished stays and is not saved. */
function abandon() {
  if (current && sheets.every((sheet) => !sheet.drawn)) return show(current);
  current = null;
  history.mark(null);
}

function refuse(error) {
  say(error.message, "error");
  if (error.status === 401) {
    element("key-row").hidden = false;
    element("key").focus();
  }
}

const isValid = () => element("controls").reportValidity();

const draw = () =>
  isValid() &&
  attempt(async (signal) => {
    const body = controls.body();
    arrange(false);
    current = await drawOn(sheets[0], body, signal);
    history.add(current);
    updateReadout();
  });

const race = () =>
  isValid() &&
  attempt(async (signal) => {
    const body = controls.body();
    const tree = body.tree === "none" ? "auto" : body.tree;
    arrange(true);
    const lanes = [drawOn(sheets[0], { ...body, tree: "none" }, signal), drawOn(sheets[1], { ...body, tree }, signal)];
    const [plain, speculative] = await Promise.all(lanes).catch(async (error) => {
      running?.abort(); // one lane alone is no race
      await Promise.allSettled(lanes);
      throw error;
    });
    current = speculative;
    history.add(speculative);
    updateReadout();
    showVerdict(plain, speculative);
  });

function showVerdict(plain, speculative) {
  const isSame = plain.result.tokens === speculative.result.tokens && samePixels(plain.image, speculative.image);
  const ratio = plain.result.seconds / speculative.result.seconds;
  const verdict = element("verdict");
  verdict.replaceChildren(
    Object.assign(document.createElement("strong"), { textContent: isSame ? "identical" : "different" }),
    ` ${isSame ? "in every pixel" : "pictures"}; ${plain.result.passes} passes became ${speculative.result.passes}, ` +
      `${plain.result.seconds.toFixed(2)} s of passes became ${speculative.result.seconds.toFixed(2)} s: ` +
      `${ratio.toFixed(2)} times the speed.`,
  );
  verdict.dataset.same = isSame;
  verdict.hidden = false;
}

function samePixels(...images) {
  const [first, second] = images.map((image) => {
    const canvas = new OffscreenCanvas(image.naturalWidth, image.naturalHeight);
    const context = canvas.getContext("2d");
    context.drawImage(image, 0, 0);
    return context.getImageData(0, 0, canvas.width, canvas.height).data;
  });
  return first.length === second.length && first.every((value, index) => value === second[index]);
}

// ---- pictures that were drawn before

function openPicture(picture) {
  if (running) return;
  current = picture;
  controls.restore(picture.body);
  show(picture);
  history.mark(picture);
  setRunning(null);
}

function show(picture) {
  arrange(false, picture);
  const [sheet] = sheets;
  for (const pass of picture.passes) sheet.addPass(pass);
  sheet.finish(picture.image, picture.result.maps, picture.body.prompt);
  updateReadout();
}

const replay = () =>
  attempt(async (signal) => {
    const { passes, image, result, body } = current;
    arrange(false, current);
    say("Replaying the passes at their own speed.");
    for (const pass of passes) {
      await new Promise((resolve) => setTimeout(resolve, pass.seconds * 1000));
      signal.throwIfAborted();
      sheets[0].addPass(pass);
      updateReadout();
    }
    sheets[0].finish(image, result.maps, body.prompt);
  }, () => show(current));

// ---- keyboard and theme

const VIEWS = ["picture", "accepted", "depth", "entropy"];

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = event.target.matches("textarea, input:not([type=range]), select");
  if (event.key === "Escape") {
    if (running) running.abort();
    else if (isTyping) event.target.blur(); // the other keys work then
    return;
  }
  if (isTyping) return;
  const actions = {
    r: race,
    p: () => current && replay(),
    s: () => current && !running && download(current),
    "/": () => element("prompt").focus(),
  };
  const action = actions[event.key.toLowerCase()] ?? (VIEWS[event.key - 1] && (() => setView(VIEWS[event.key - 1])));
  if (!action) return;
  event.preventDefault();
  action();
}

function onViewKey(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const view = VIEWS[(VIEWS.indexOf(sheets[0].view) + step + VIEWS.length) % VIEWS.length];
  setView(view);
  document.querySelector(`[data-view=${view}]`).focus();
}

function setTheme(theme) {
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  element("theme").textContent = `Theme: ${theme}`;
  element("theme").dataset.next = { auto: "light", light: "dark", dark: "auto" }[theme];
  localStorage.setItem("theme", theme);
  for (const sheet of sheets) sheet.render();
  paintBarcode(element("barcode"), sheets[shown]);
}

function showInfo(info) {
  element("facts").textContent = `${info.model} · ${info.device} · ${info.dtype} · drafter ${info.drafter}`;
  element("version").textContent = `underdraw ${info.version}`;
  element("key-row").hidden = !info.needs_key || Boolean(sessionStorage.getItem("key"));
  arrange(false, info.sizes[0]);
}

/** Asks the server what it has; a page that could not reach it tries again with the next picture. */
async function connect() {
  const info = await fetchJson("/info");
  controls = new Controls(info);
  showInfo(info);
}

async function start() {
  setTheme(localStorage.getItem("theme") ?? "auto");
  setView("picture");
  element("controls").addEventListener("submit", (event) => (event.preventDefault(), draw()));
  element("prompt").addEventListener("keydown", (event) => {
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    draw();
  });
  element("race").addEventListener("click", race);
  element("replay").addEventListener("click", replay);
  element("cancel").addEventListener("click", () => running?.abort());
  element("download").addEventListener("click", () => download(current));
  element("key").addEventListener("change", () => sessionStorage.setItem("key", element("key").value.trim()));
  element("theme").addEventListener("click", () => setTheme(element("theme").dataset.next));
  for (const button of document.querySelectorAll("[data-view]")) {
    button.addEventListener("click", () => setView(button.dataset.view));
    button.addEventListener("keydown", onViewKey);
  }
  document.addEventListener("keydown", onKey);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(localStorage.getItem("theme") ?? "auto"));
  try {
    await connect();
    if (matchMedia("(pointer: fine)").matches) element("prompt").focus({ preventScroll: true }); // no keyboard over the page
  } catch (error) {
    say(error.message, "error");
  }
}

start();
