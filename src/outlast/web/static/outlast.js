// What the page can only do with JavaScript, and does not need: keys, countdowns, the viewer's zone, and live changes that leave alone
// what somebody is typing in. Everything is an event listener on the document: no element carries code.
"use strict";
(() => {
  const page = document.documentElement;
  const zone = Intl.DateTimeFormat().resolvedOptions().timeZone || "UTC";
  const skew = Date.parse(page.dataset.now) - Date.now();       // the server's clock is the one that counts
  const now = () => Date.now() + skew;

  // ---- the viewer's zone: a cookie, and one reload where the server did not know it ----------------------------------
  if (page.dataset.zone !== zone && !/outlast_zone=/.test(document.cookie)) {
    document.cookie = "outlast_zone=" + encodeURIComponent(zone) + "; path=" + (page.dataset.root || "") + "/; max-age=31536000; samesite=strict";
    if (/outlast_zone=/.test(document.cookie)) location.reload();
  }

  // ---- countdowns ------------------------------------------------------------------------------------------------------
  const parts = (seconds) => {
    const minutes = Math.floor(seconds / 60), hours = Math.floor(minutes / 60), days = Math.floor(hours / 24);
    if (seconds < 60) return [[seconds, "s"]];
    if (minutes < 60) return [[minutes, "min"]];
    if (hours < 24) return minutes % 60 ? [[hours, "h"], [minutes % 60, "min"]] : [[hours, "h"]];
    return hours % 24 ? [[days, "d"], [hours % 24, "h"]] : [[days, "d"]];
  };
  function count() {
    for (const due of document.querySelectorAll("[data-deadline]")) {
      const seconds = Math.floor((Date.parse(due.dataset.deadline) - now()) / 1000);
      if (seconds < 0) {
        due.textContent = "over";
        due.classList.add("due-soon");
        if (!due.dataset.over) { due.dataset.over = "1"; document.getElementById("board")?.dispatchEvent(new Event("stale")); }
        continue;
      }
      due.classList.toggle("due-soon", seconds < 900);
      const made = document.createDocumentFragment();
      parts(seconds).forEach(([n, unit], i) => {
        const bold = document.createElement("b");
        bold.textContent = n;
        made.append(i ? " " : "", bold, " " + unit);
      });
      if (made.textContent !== due.textContent) due.replaceChildren(made);
    }
  }
  setInterval(count, 1000);

  // ---- live: never swap what somebody types in ---------------------------------------------------------------------------
  const typing = () => {
    const at = document.activeElement;
    if (at && at.matches("#board textarea, #board input, #board select")) return true;
    return [...document.querySelectorAll("#board textarea, #board input:not([type=hidden]):not([type=checkbox])")].some((x) => x.value !== x.defaultValue);
  };
  const say = (text) => { const news = document.getElementById("news"); if (news && text) news.textContent = text; };
  let known = new Set([...document.querySelectorAll(".ask")].map((x) => x.id));
  let waiting = false;
  function told(fresh) {
    const ids = new Set([...fresh.querySelectorAll(".ask")].map((x) => x.id));
    const more = [...ids].filter((x) => !known.has(x)).length, gone = [...known].filter((x) => !ids.has(x)).length;
    known = ids;
    if (more || gone) say([more ? more + " new" : "", gone ? gone + " decided" : ""].filter(Boolean).join(", "));
  }
  function decidedMeanwhile(fresh) {
    for (const ask of document.querySelectorAll(".ask[open]")) {
      const field = ask.querySelector("textarea, input");
      if (!field || [...fresh.querySelectorAll(".ask")].some((x) => x.id === ask.id) || ask.querySelector(".meanwhile")) continue;
      const note = document.createElement("p");
      note.className = "notice meanwhile ask-wide";
      note.textContent = "This one was answered meanwhile, or its time is over. What you send now changes nothing.";
      ask.querySelector(".ask-body")?.prepend(note);
      say(note.textContent);
    }
  }
  if (window.htmx) {
    htmx.registerExtension("outlast", {
      htmx_before_swap: (element, detail) => {
        const ctx = detail.ctx;
        if (!ctx || ctx.sourceElement?.id !== "board") return true;
        const fresh = new DOMParser().parseFromString(ctx.text, "text/html");
        if (typing()) { decidedMeanwhile(fresh); waiting = true; return false; }
        told(fresh);
        return true;
      },
    });
  }
  document.addEventListener("focusout", () => setTimeout(() => {
    if (waiting && !typing()) { waiting = false; document.getElementById("board")?.dispatchEvent(new Event("stale")); }
  }, 0));

  // ---- keys --------------------------------------------------------------------------------------------------------------
  const summaries = () => [...document.querySelectorAll(".ask > summary")];
  const here = () => document.activeElement?.closest?.(".ask") || document.querySelector(".ask[open]");
  function move(step) {
    const all = summaries(), at = all.indexOf(document.activeElement?.closest?.(".ask")?.querySelector("summary"));
    const next = all[Math.min(all.length - 1, Math.max(0, at < 0 ? (step > 0 ? 0 : all.length - 1) : at + step))];
    if (next) { next.focus(); next.scrollIntoView({ block: "nearest" }); }
  }
  function act(key) {
    const ask = here();
    if (!ask) return false;
    if (!ask.open) { ask.open = true; ask.querySelector("summary").focus(); return true; }   // look first
    const target = ask.querySelector('[data-key="' + key + '"]');
    if (!target) return false;
    const folded = [...ask.querySelectorAll(".fold-more:not([open])")];
    if (key === "a" && folded.length) { folded.forEach((x) => { x.open = true; }); folded[0].querySelector("summary").focus(); say("All of it is shown now"); return true; }
    if (key === "e") { target.closest("details").open = true; (target.closest("details").querySelector("input:not([type=hidden]), textarea, select") || target).focus(); }
    else if (key === "r") target.focus();
    else target.click();
    return true;
  }
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const at = document.activeElement;
    if (at && at.matches("input, textarea, select")) { if (event.key === "Escape") (at.closest(".ask")?.querySelector("summary") || at).focus(); return; }
    if (!document.querySelector(".ask")) return;
    const done = { j: () => (move(1), true), k: () => (move(-1), true), a: () => act("a"), e: () => act("e"), r: () => act("r"),
      "?": () => { const keys = document.getElementById("keys"); keys?.focus(); keys?.scrollIntoView({ block: "nearest" }); return Boolean(keys); } }[event.key]?.();
    if (done) event.preventDefault();
  });
})();
