// Hover and pin on the timeline, zoom of it, and copying of commands. The page reads without it.
(() => {
  "use strict";
  const tip = document.getElementById("tip");
  const kinds = ["forward", "backward", "backward, gradients of inputs", "backward, gradients of weights"];
  let pinned = false;

  function duration(microseconds) {
    if (microseconds >= 1e6) return (microseconds / 1e6).toPrecision(4) + " s";
    if (microseconds >= 1e3) return (microseconds / 1e3).toPrecision(4) + " ms";
    return microseconds.toPrecision(4) + " µs";
  }

  function put(text, event) {
    tip.textContent = text;
    tip.hidden = !text;
    if (!text) return;
    const box = tip.getBoundingClientRect();
    tip.style.left = Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8)) + "px";
    tip.style.top = Math.max(4, Math.min(event.clientY + 16, innerHeight - box.height - 8)) + "px";
  }

  function timeline(svg) {
    const lines = JSON.parse(svg.dataset.lines);
    const whole = svg.viewBox.baseVal.width, high = svg.viewBox.baseVal.height;
    let left = 0, wide = whole;

    function under(event) {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const row = Math.floor((at.y - lines.top) / lines.tall);
      if (at.y < lines.top || !lines.rows[row]) return "";
      const of = lines.rows[row];
      let low = 0, top = of.length;
      while (low < top) {
        const middle = (low + top) >> 1;
        if (of[middle][0] <= at.x) low = middle + 1; else top = middle;
      }
      const found = of[low - 1];
      if (!found || at.x > found[0] + found[1]) return "idle";
      if (found[3] < 0) return ["update", "fixed", "waiting for the host"][found[2] - 4] + ": " + duration(found[5]);
      return "stage " + found[3] + ", micro-batch " + found[4] + ", " + kinds[found[2]] + ": " + duration(found[5]);
    }

    function view() {
      left = Math.max(0, Math.min(left, whole - wide));
      svg.setAttribute("viewBox", left + " 0 " + wide + " " + high);
      svg.setAttribute("preserveAspectRatio", wide < whole ? "none" : "xMidYMid meet");
      svg.style.height = wide < whole ? svg.clientHeight + "px" : "";
      svg.querySelectorAll("text").forEach(text => {
        text.style.visibility = wide < whole ? "hidden" : "";
      });
    }

    svg.addEventListener("pointermove", event => { if (!pinned) put(under(event), event); });
    svg.addEventListener("pointerleave", () => { if (!pinned) tip.hidden = true; });
    svg.addEventListener("click", event => {
      pinned = !pinned && under(event) !== "";
      tip.classList.toggle("pinned", pinned);
      put(under(event), event);
    });
    const bar = document.createElement("div");
    bar.className = "zoom";
    const steps = {
      "zoom in": () => { left += wide / 4; wide /= 2; },
      "zoom out": () => { left -= wide / 2; wide = Math.min(whole, wide * 2); },
      "left": () => { left -= wide / 3; },
      "right": () => { left += wide / 3; },
      "whole": () => { left = 0; wide = whole; },
    };
    for (const [name, step] of Object.entries(steps)) {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = name;
      button.addEventListener("click", () => { step(); view(); });
      bar.append(button);
    }
    svg.closest("figure").before(bar);
  }

  document.querySelectorAll("svg[data-lines]").forEach(timeline);
  document.addEventListener("keydown", event => {
    if (event.key === "Escape") { pinned = false; tip.classList.remove("pinned"); tip.hidden = true; }
  });
  document.querySelectorAll("pre").forEach(pre => {
    pre.title = "double-click to copy";
    pre.addEventListener("dblclick", event => {
      navigator.clipboard?.writeText(pre.textContent).then(() => put("copied", event), () => {});
    });
  });
  addEventListener("beforeprint", () => document.querySelectorAll("details").forEach(one => { one.open = true; }));
})();
